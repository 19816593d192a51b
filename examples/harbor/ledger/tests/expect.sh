# Writes the reward 1 if the file $1 has the content $2, else 0.
if [ "$(cat "$1" 2>/dev/null)" = "$2" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
