#!/bin/bash
cat /app/more.txt >>/app/ledger.txt
awk "{s += \$2} END {print s}" /app/ledger.txt >/app/sum.txt
