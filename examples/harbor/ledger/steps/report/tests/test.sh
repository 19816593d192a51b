#!/bin/bash
bash /tests/expect.sh /app/sum.txt 1000
