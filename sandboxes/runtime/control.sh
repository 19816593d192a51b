# The first process of a sandbox: starts and signals processes for the host, which alone holds the other end
# of its standard input, a socket. It ends when that closes, and as process 1 takes everything inside with it.
# Usage: control.sh PIPES WORKDIR MAX_PROCESSES MAX_DATA [ANSWERS]; it answers on its standard input, or on the pipe
# of this name where that goes one way. The limits, of processes and of each one's data in KiB,
# are for what it starts and not for itself, and 0 is none. A message is COUNT and COUNT fields, each ended by NUL.
# The host's end of every pipe is open before its message comes, so that no redirection here waits.
set -m # every child leads a process group of its own, which is what signals are sent to
trap : INT TERM HUP QUIT
pipes=$1 workdir=$2 max_processes=$3 max_data=$4
groups=() # that were started, where this is not process 1
unset PROMPT_COMMAND OLDPWD "${!APPTAINER@}" "${!SINGULARITY@}" "${!LAUNCH@}"

# The copy that this shell runs from has done its work, see apptainer.py.
if [[ $BASH == /dev/shm/.control ]]; then rm -f "$BASH"; fi

# The kernel should end what the agent runs before this shell.
{ printf 500 >/proc/self/oom_score_adj; } 2>/dev/null

# Descriptors of whatever started this shell are none of the agent's business.
for path in /proc/self/fd/*; do
  fd=${path##*/}
  if ((fd > 2 && fd != 255)); then eval "exec $fd>&-"; fi
done 2>/dev/null
if [[ -n ${5-} ]]; then exec 7>"$pipes/$5"; else exec 7>&0; fi

# spawn TOKEN MODE CWD COUNT ENV... ARGV...: the status pipe gets "+PID", and in mode "run" the exit code.
spawn() {
  local pipe=$pipes/$1 mode=$2 cwd=$3 count=$4 entry
  shift 4
  (
    exec 0<"$pipe.in" 1>"$pipe.out" 2>"$pipe.err" 7>&- 9>"$pipe.st" || exit 126
    printf '+%s\n' "$BASHPID" >&9
    cd -- "$cwd" || { printf '126\n' >&9; exit 126; }
    for entry in "${@:1:count}"; do export -- "${entry?}"; done
    shift "$count"
    if [[ $mode == session ]]; then limit; exec -- "$@" 8>&1 1<>/dev/null 2>&1; fi
    (limit; exec -- "$@" 9>&-) # limited after the fork, so that at the limit programs still start
    printf '%s\n' "$?" >&9
  ) &
  disown
  if (($$ != 1)); then
    if ((${#groups[@]} >= 256)); then drop_ended_groups; fi
    groups+=("$!")
  fi
}

limit() {
  if ((max_processes > 0)); then ulimit -u "$max_processes"; fi
  if ((max_data > 0)); then ulimit -d "$max_data"; fi
} 2>/dev/null

# Forget the groups whose leader has gone: its number may belong to somebody else by now.
drop_ended_groups() {
  local pid ppid group session start alive=()
  for pid in "${groups[@]}"; do
    if stat_of "$pid" && ((session == $$)); then alive+=("$pid"); fi
  done
  groups=("${alive[@]}")
}

# stat_of PID: sets state, ppid, group, session and start (in ticks since boot); fails where the process has gone.
stat_of() {
  local line fields
  { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return
  read -r -a fields <<<"${line##*) }" # what follows the command's name, which may hold anything
  state=${fields[0]} ppid=${fields[1]} group=${fields[2]} session=${fields[3]} start=${fields[19]}
}

# stop LEADER NAME SINCE TRIES KEPT...: interrupts the leader, a shell, so that it drops the rest of its command, and
# signals what the command started. Spared are the jobs KEPT, and what is older than the command, with all below them:
# they are in the background. Both are needed, since start times alone are too coarse.
# A shell heeds SIGINT only if its program dies of it too, so the programs of a loop are tried one after another.
stop() {
  local leader=$1 name=$2 since=$3 tries=$4 pid caught=0
  local -A kept=()
  for pid in "${@:5}"; do kept[$pid]=1; done
  if [[ ! -e /proc/$$/task/$$/children ]]; then # a kernel that does not tell: the group, of which jobs ignore SIGINT
    kill -s INT -- "-$leader"
    return
  fi
  for ((; tries > 0 && !caught; tries--)); do stop_tree "$leader"; done
} 2>/dev/null

# What is stopped starts no others, and does not end by itself before its signal.
stop_tree() {
  local file pid below children=() state ppid group session start
  kill -s STOP "$1"
  for file in /proc/"$1"/task/*/children; do
    read -r -a below <"$file"
    children+=("${below[@]}")
  done
  if (($1 == leader)); then kill -s INT "$1"; else kill -s "$name" "$1"; fi
  for pid in "${children[@]}"; do
    if [[ -z ${kept[$pid]-} ]] && stat_of "$pid" && ((start >= since)); then
      if [[ $state != Z ]]; then caught=1; fi
      stop_tree "$pid"
    fi
  done
  kill -s CONT "$1"
}

# Everything but this shell. Where it is not process 1, that is what still belongs to its session.
end_all() {
  local path pid ppid group session start
  if (($$ == 1)); then
    kill -KILL -1 2>/dev/null
    return
  fi
  for path in /proc/[0-9]*; do
    pid=${path##*/}
    stat_of "$pid" || continue
    if ((pid != $$ && session == $$)); then kill -KILL "$pid"; fi
  done 2>/dev/null
}

mkdir -p -- "$workdir" && cd -- "$workdir" || exit 1
printf 'ready\n' >&7
while IFS= read -r -d '' count; do
  mapfile -d '' -t -n "$count" message
  set -- "${message[@]}"
  case $1 in
    spawn) spawn "${@:2}" ;;
    signal) kill -s "$3" -- "-$2" 2>/dev/null ;; # signal GROUP NAME
    stop) stop "${@:2}" ;;
    interrupt) kill -s INT "$2" 2>/dev/null ;; # interrupt LEADER
    processes) max_processes=$2 ;; # processes COUNT: those of the launcher, which are counted too, and the limit
    rest) printf '%s\n' "$2" >&7 ;; # rest TOKEN: all that came before has been done
    end) end_all; wait; printf '%s\n' "$2" >&7 ;; # end TOKEN
  esac
done

# The host's end is closed. Process 1 takes everything with it; elsewhere the host finds what has left its group.
drop_ended_groups
for group in "${groups[@]}"; do kill -KILL -- "-$group"; done 2>/dev/null
