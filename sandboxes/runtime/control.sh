# The first process of a sandbox: starts and signals processes for the host. Only the host holds the other end of its
# standard input, a socket. When that closes, this shell ends, and as process 1 takes everything inside with it.
# Usage: control.sh PIPES WORKDIR MAX_PROCESSES MAX_DATA [ANSWERS]
# It answers on its standard input, or on the pipe ANSWERS if that input is one-way. The limits, on processes and on
# each one's data in KiB, apply to the processes it starts, not to itself; 0 means none.
# A message is COUNT and then COUNT fields, each ended by NUL. The host opens its end of every pipe before it sends the
# message, so no redirection here waits.
set -m # every child leads a process group of its own, which is what signals are sent to
trap : INT TERM HUP QUIT
pipes=$1 workdir=$2 max_processes=$3 max_data=$4
groups=() # the process groups started, if this is not process 1
unset PROMPT_COMMAND OLDPWD "${!APPTAINER@}" "${!SINGULARITY@}" "${!LAUNCH@}"

# The copy that this shell runs from is no longer needed, see HIDE in providers/base.py. A launcher removes it itself.
if [[ $BASH == /dev/shm/.control && -e $BASH ]]; then rm -f "$BASH"; fi

# If memory runs out, the kernel should kill the agent's programs before this shell.
{ printf 500 >/proc/self/oom_score_adj; } 2>/dev/null

# The agent must not get the descriptors of the program that started this shell.
for path in /proc/self/fd/*; do
  fd=${path##*/}
  if ((fd > 2 && fd != 255)); then eval "exec $fd>&-"; fi
done 2>/dev/null
if [[ -n ${5-} ]]; then exec 7>"$pipes/$5"; else exec 7>&0; fi

# spawn TOKEN MODE CWD COUNT ENV... ARGV...: the status pipe gets "+PID", and in mode "run" the exit code.
spawn() {
  local pipe=$pipes/$1 mode=$2 cwd=$3 count=$4
  shift 4
  (
    exec 0<"$pipe.in" 1>"$pipe.out" 2>"$pipe.err" 7>&- 9>"$pipe.st" || exit 126
    printf '+%s\n' "$BASHPID" >&9 || exit 126 # its caller has left
    cd -- "$cwd" || { printf '126\n' >&9; exit 126; }
    if [[ $mode == session ]]; then limit; become "$count" "$@" 8>&1 1<>/dev/null 2>&1; fi
    (limit; become "$count" "$@" 9>&-) # limited after the fork, so programs still start at the limit
    printf '%s\n' "$?" >&9
  ) &
  disown
  if (($$ != 1)); then
    if ((${#groups[@]} >= 256)); then drop_ended_groups; fi
    groups+=("$!")
  fi
}

# become COUNT ENV... ARGV...: runs a program in place of this shell. Its variables may have the name of any one here,
# such as that of a limit, so nothing else is looked up after they are set.
become() {
  unset -v groups message # an array is not exported
  if (($1 > 0)); then export -- "${@:2:$1}"; fi
  shift "$(($1 + 1))"
  exec -- "$@"
}

limit() {
  if ((max_processes > 0)); then ulimit -u "$max_processes"; fi
  if ((max_data > 0)); then ulimit -d "$max_data"; fi
} 2>/dev/null

# Forget the groups whose leader has ended: its pid may belong to another process by now.
drop_ended_groups() {
  local pid ppid group session start alive=()
  for pid in "${groups[@]}"; do
    if stat_of "$pid" && ((session == $$)); then alive+=("$pid"); fi
  done
  groups=("${alive[@]}")
}

# stat_of PID: sets state, ppid, group, session and start (in ticks since boot); fails if the process has ended.
stat_of() {
  local line fields
  { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return
  # The part after the command's name, which may contain anything. `read` would take it from a pipe byte by byte.
  fields=(${line##*) })
  state=${fields[0]} ppid=${fields[1]} group=${fields[2]} session=${fields[3]} start=${fields[19]}
}

# stop LEADER NAME SINCE TRIES KEPT...: interrupts the leader, a shell, which makes it drop the rest of its command, and
# signals the processes that the command started. The jobs KEPT, processes older than the command, and all their
# descendants are spared: they are in the background. Both tests are needed, since start times alone are too coarse.
# A shell heeds SIGINT only if its program dies of it too, so the programs of a loop are tried one after another.
stop() {
  local leader=$1 name=$2 since=$3 tries=$4 pid caught=0
  local -A kept=()
  for pid in "${@:5}"; do kept[$pid]=1; done
  if [[ ! -e /proc/$$/task/$$/children ]]; then # the kernel does not list children: signal the group; jobs ignore SIGINT
    kill -s INT -- "-$leader"
    return
  fi
  for ((; tries > 0 && !caught; tries--)); do stop_tree "$leader"; done
} 2>/dev/null

# A stopped process starts no others, and does not end by itself before its signal.
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

# End every process except this shell. If it is not process 1, these are the ones that still belong to its session.
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
    processes) max_processes=$2 ;; # processes COUNT: the limit plus the launcher's processes, which count too
    rest) printf '%s\n' "$2" >&7 ;; # rest TOKEN: all earlier messages have been carried out
    end) end_all; wait; printf '%s\n' "$2" >&7 ;; # end TOKEN
  esac
done

# The host's end is closed. Process 1 takes everything with it; otherwise the host finds processes that left their group.
drop_ended_groups
for group in "${groups[@]}"; do kill -KILL -- "-$group"; done 2>/dev/null
