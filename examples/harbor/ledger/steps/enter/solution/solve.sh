#!/bin/bash
printf "rent 700\nfood 250\n" >/app/ledger.txt
