#!/bin/bash
cat /app/texts/*.txt | wc -w >/app/count.txt
