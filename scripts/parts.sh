# Installs parts side by side; lib.sh sources it. A part is whatever an `ensure_PART` of lib.sh installs.

# What a part needs first.
declare -A after=(
    [venv]=bootstrap
    [bytecode]=venv
    [trainer]=venv
    [base_image]="venv apptainer"
    [openai_image]=base_image
    [swe_base_image]=base_image
    [swe]="swebench swe_base_image"
    [swebench]=venv
    [harnesses]=base_image
    [bridges]="venv programs"
    [systemd]=programs
    [docker]=programs
    [browser]=programs
    [harbor]=bootstrap
    [perfetto]=bootstrap
    [seaweedfs]=bootstrap
    [valkey]=bootstrap
    [sglang]=bootstrap
    [vllm]="bootstrap programs"
    [trainers]=bootstrap
)
part=              # the one that this shell installs beside others
at_once=4          # more than the CPUs of a small machine, because they often wait for the network
progress_seconds=5 # between the lines that say what is waited for

# with_needs PART...: print the parts in an order in which each follows those that it needs.
with_needs() {
    local part
    for part in "$@"; do
        # shellcheck disable=SC2046,SC2086 # lists of words
        printf '%s\n' $(with_needs ${after[$part]:-}) "$part"
    done | awk '!seen[$0]++'
}

# start_installs PART...: begin to install parts and what they need, in the background; those that are named first begin
# first. They hold the lock, and end with this shell.
start_installs() {
    mapfile -t installing < <(with_needs "$@")
    installs=$cache/installs
    rm -rf "$installs"
    mkdir -p "$installs"
    set -m # a process group of its own
    run_installs "${installing[@]}" </dev/null &
    set +m
    installer=$!
    trap end_installs EXIT
}

# Once the installs have ended, their number may be that of any other process.
end_installs() {
    [[ $'\n'$(jobs -pr)$'\n' != *$'\n'"$installer"$'\n'* ]] || kill -- "-$installer" 2>/dev/null || true
}

# await_parts PART...: return as soon as these parts of `start_installs` are there, or the time `give_up_at` has come. A part
# that could not be installed is a failure at any time.
await_parts() {
    local part
    for part in "$@"; do
        until [[ -e $installs/$part.done ]]; do
            kill -0 "$installer" 2>/dev/null || [[ -e $installs/$part.done ]] || exit 1 # it has said why
            ((${give_up_at:-EPOCHSECONDS + 1} > EPOCHSECONDS)) || return 0
            sleep 0.1
        done
    done
}

# install_parts PART...: install parts and what they need, and wait for them.
install_parts() {
    start_installs "$@"
    await_parts "$@"
}

run_installs() {
    local -A running=()
    local waiting=("$@") later part said=$EPOCHSECONDS
    while ((${#waiting[@]} + ${#running[@]})); do
        later=()
        for part in "${waiting[@]}"; do
            if ((${#running[@]} < at_once)) && may_begin "$part"; then
                install_part "$part" &
                running[$part]=$!
            else
                later+=("$part")
            fi
        done
        waiting=(${later[@]+"${later[@]}"})
        sleep 0.1
        for part in "${!running[@]}"; do
            kill -0 "${running[$part]}" 2>/dev/null && continue
            wait "${running[$part]}" || end_all
            unset "running[$part]"
            touch "$installs/$part.done"
        done
        ((EPOCHSECONDS < said + progress_seconds)) || { said=$EPOCHSECONDS && say_what_runs "${!running[@]}"; }
    done
}

# One has failed, and has said why.
end_all() {
    trap '' TERM
    kill 0
    exit 1
}

may_begin() {
    local need
    for need in ${after[$1]:-}; do
        [[ -e $installs/$need.done ]] || return
    done
}

# Each part has a log of its own. The file of its name says which step it is at.
install_part() {
    part=$1
    setup_log=$cache/setup-$part.log
    echo "$part" >"$installs/$part"
    "ensure_$part"
}

say_what_runs() {
    local part text=
    for part in "$@"; do
        text+="${text:+; }$(<"$installs/$part"), $((EPOCHSECONDS - $(stat -c %Y "$installs/$part"))) s"
    done
    echo "    waiting for: $text" >&2
}
