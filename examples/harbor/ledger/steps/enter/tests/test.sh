#!/bin/bash
bash /tests/expect.sh /app/ledger.txt $'rent 700\nfood 250'
