# Write the reward, and the milliseconds from the first line to here.
begin=${EPOCHREALTIME/[.,]/}
sleep 0.1
end=${EPOCHREALTIME/[.,]/}
printf '{"reward": 1.0, "parts": {"grader_ms": %d.%03d}}' $(((end - begin) / 1000)) $(((end - begin) % 1000)) >"$ROLLOUT_RESULT"
