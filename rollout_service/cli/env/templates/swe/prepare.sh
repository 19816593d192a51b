# Puts the repository into the working folder, without the history that has the repair.
set -e
cp -r "$ROLLOUT_ENVIRONMENT/repo/." .
