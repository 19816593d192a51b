# Functions shared by the scripts of this folder; source it. Each `ensure_*` is quick if there is nothing to do, safe to
# interrupt, and safe to run twice at once (a lock is held while something is installed).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$root/.cache
venv=$root/.venv
setup_log=$cache/setup-${0##*/}.log

unset PYTHONDONTWRITEBYTECODE # or each of many processes compiles the same modules
export HOME=${HOME:-~}        # services and jobs may lack it; `~` is then what the system says

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# show_help ARGUMENT...: if the first argument asks for it, print the comment at the top of this script, and end.
show_help() {
    [[ ${1:-} == -h || ${1:-} == --help ]] || return 0
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit
}

# Sandboxes need features of the Linux kernel; macOS also lacks programs that these scripts call.
require_linux() {
    [[ $(uname -s) == Linux ]] ||
        fail "this needs Linux, and this is $(uname -s). Use a Linux machine, or a virtual one (on Windows: WSL 2)." \
            "The client alone runs anywhere: point it at a server"
}
require_linux

# step TEXT COMMAND...: run a command with its output in the log; print one line with its seconds and, if it fails, the
# end of the log. The line of a part that is installed beside others is printed at its end. A function must end each of its
# commands but the last with `&&` or `|| return`: within a condition, bash goes on after one that fails.
step() {
    local text=$1 start=$EPOCHREALTIME line="==> $1 ... "
    shift
    mkdir -p "$cache"
    if [[ -n ${part:-} ]]; then
        echo "$text" >"$installs/$part"
    else
        printf '%s' "$line" >&2
        line=
    fi
    if ! "$@" >"$setup_log" 2>&1 9>&-; then
        printf '%sfailed\n' "$line" >&2
        tail -n 25 "$setup_log" >&2
        fail "\"$text\" failed; the whole output is in $setup_log"
    fi
    LC_ALL=C printf '%s%.1f s\n' "$line" "$(awk "BEGIN { print $EPOCHREALTIME - $start }")" >&2
}

# The lock belongs to a descriptor of this shell; `unlock`, or the end of the shell, releases it.
lock() {
    mkdir -p "$cache"
    exec 9>"$cache/setup.lock"
    flock -n 9 || { echo "==> waiting for another setup of this checkout" >&2; flock 9; }
}

unlock() {
    exec 9>&-
}

# needs_admin WHAT COMMAND...: fail for an ordinary user, and say what an administrator must run.
needs_admin() {
    local what=$1
    shift
    [[ $(id -u) == 0 ]] || fail "$what is missing; an administrator installs it with: sudo $*"
}

apt_install() {
    apt-get update --quiet || true # the existing lists may suffice
    # Packages do not start their services in this run level.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install --yes --quiet \
        --no-install-recommends "$@"
}

# with_apt COMMAND...: run a command that uses apt, which neither installs twice at once nor reads lists while it gets them. It
# goes on when this script is ended: packages that are installed by half keep apt from installing anything.
with_apt() {
    (
        trap '' HUP INT TERM
        flock 8
        "$@" 8>&-
    ) 8>"$cache/apt.lock"
}

# --- Python -------------------------------------------------------------------------------------------------

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [[ -z ${ROLLOUT_PYTHON:-} ]] || candidates=("$ROLLOUT_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "there is no Python 3.11 or newer; an administrator installs it with: sudo apt-get install python3 python3-venv" \
        "(or name one in ROLLOUT_PYTHON)"
}

# pip_setting SETTINGS NAME: print a setting of pip (indexes and folders of packages), which uv does not read.
pip_setting() {
    local variable=PIP_${2^^}
    variable=${variable//-/_}
    if [[ -n ${!variable:-} ]]; then
        echo "${!variable}"
    else
        # `pip config list` writes values as Python does: 'a\nb'
        sed -n "s/^\(global\|install\)\.$2='\(.*\)'\$/\2/p" <<<"$1" | sed '1!d; s/\\n/ /g; s/^ *//'
    fi
}

# configure_uv PYTHON: give uv the settings of this Python's pip.
configure_uv() {
    local settings value
    export UV_SYSTEM_CERTS=1 UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=never
    # pip searches all of its indexes. Every package is pinned by hash, so the best match is also a safe one.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    settings=$("$1" -m pip config list 2>/dev/null) || true
    if [[ -z ${UV_DEFAULT_INDEX:-} ]] && value=$(pip_setting "$settings" index-url) && [[ -n $value ]]; then
        export UV_DEFAULT_INDEX=$value
    fi
    if [[ -z ${UV_INDEX:-} ]] && value=$(pip_setting "$settings" extra-index-url) && [[ -n $value ]]; then
        export UV_INDEX=$value
    fi
    if [[ -z ${UV_FIND_LINKS:-} ]] && value=$(pip_setting "$settings" find-links) && [[ -n $value ]]; then
        export UV_FIND_LINKS=${value// /,}
    fi
}

# uv is installed in its own environment, so a machine needs only pip, or Python's module to make one.
ensure_bootstrap() {
    python=$(find_python) || exit 1
    uv=$cache/bootstrap/bin/uv
    bootstrap_is_ready && return
    has_pip || "$python" -c 'import ensurepip, venv' 2>/dev/null || install_venv_module
    step "install uv" bootstrap_uv
}

# uv with the settings of pip, which take a second to read: only for what installs something.
ensure_uv() {
    ensure_bootstrap
    PATH=$PATH:$cache/bootstrap/bin # last: its Python has no pip, and must not be the one that is found next
    pip_python=$(python_with_pip)
    configure_uv "$pip_python"
    export ROLLOUT_UV=$uv # images get their Python packages through it, too
}

# An environment that uv made, such as the activated .venv, has no pip: the Python from which it was made may have one.
python_with_pip() {
    local candidate
    for candidate in "$cache/bootstrap/bin/python" "$python" "$("$python" -c 'import sys; print(sys._base_executable)')"; do
        ! "$candidate" -c 'import pip' 2>/dev/null || break
    done
    echo "$candidate"
}

# A pip of 22.3 or newer installs into other environments.
has_pip() {
    "$python" -m pip --python "$python" --version >/dev/null 2>&1
}

install_venv_module() {
    command -v apt-get >/dev/null ||
        fail "$python cannot make environments (venv, ensurepip); install them from where this Python came"
    needs_admin "Python's venv module" apt-get install python3-venv
    step "install Python's venv module" with_apt apt_install python3-venv
}

bootstrap_is_ready() {
    [[ -x $uv ]] && cmp -s "$root/scripts/bootstrap.lock" "$cache/bootstrap/installed.lock"
}

# With this Python's own pip if it has one: making another takes most of the time. Scripts that hold different locks may come
# here at once.
bootstrap_uv() (
    local own=$cache/bootstrap/bin/python pip=("$python" -m pip --python "$cache/bootstrap/bin/python") without=--without-pip
    flock 7
    ! bootstrap_is_ready || return 0
    has_pip || { pip=("$own" -m pip) && without=; }
    "$python" -m venv --clear $without "$cache/bootstrap" &&
        "${pip[@]}" install --quiet --disable-pip-version-check --no-compile --require-hashes \
            --requirement "$root/scripts/bootstrap.lock" &&
        cp "$root/scripts/bootstrap.lock" "$cache/bootstrap/installed.lock"
) 7>"$cache/bootstrap.lock"

# --- the project --------------------------------------------------------------------------------------------

venv_fingerprint() {
    { cat "$root/requirements.lock" "$root/pyproject.toml" "$root/packaging/client/pyproject.toml"; echo "$root"; } | sha256sum | cut -d' ' -f1
}

venv_is_ready() {
    [[ -x $venv/bin/rollout-service && -f $venv/.installed && $(<"$venv/.installed") == "$(venv_fingerprint)" ]]
}

# install_editable ENVIRONMENT PROJECT...: install projects without their dependencies. Each is built in its own
# environment, with the build backend of the lock.
install_editable() {
    local environment=$1
    shift
    "$uv" pip install --quiet --python "$environment/bin/python" --no-deps "${@/#/--editable=}" \
        --build-constraints "$root/scripts/bootstrap.lock" --require-build-hashes
}

# If the checkout was copied or moved, the environment's programs start another Python, or none. The system's may be gone too.
venv_is_here() {
    [[ -x $venv/bin/python && $(sed -n "s/^VIRTUAL_ENV='\(.*\)'\$/\1/p" "$venv/bin/activate") -ef $venv ]]
}

ensure_venv() {
    venv_is_ready && return
    ensure_uv
    { venv_is_here && [[ ! -e $venv/.unfinished ]]; } || step "make .venv" "$uv" venv --quiet --clear --python "$python" "$venv"
    rm -f "$venv/.installed"
    touch "$venv/.unfinished" # an install that is cut off leaves packages of which uv cannot tell that they are not whole
    step "install the locked packages" "$uv" pip install --quiet --python "$venv/bin/python" --require-hashes \
        --requirement "$root/requirements.lock"
    step "install the project" install_editable "$venv" "$root/packaging/client" "$root"
    venv_fingerprint >"$venv/.installed"
    rm "$venv/.unfinished"
}

# What the demo imports, compiled while the base image is built. Otherwise its first start would do that.
ensure_bytecode() {
    local stamp=$venv/.compiled
    [[ $stamp -nt $venv/.installed ]] && return
    step "compile what the demo imports" "$venv/bin/python" -c 'import rollout_service.server.api.serve, rollout_service.cli.demo.run
import rollout_service.engines.kinds.embedded.server'
    touch "$stamp"
}

# deploy/torch/torch.txt says why torch is not in a lock. Its requirements are installed first, so torch comes alone.
# Whoever installs a package writes its INSTALLER last.
trainer_is_ready() {
    "$venv/bin/python" -c 'import importlib.metadata as found; assert found.distribution("torch").read_text("INSTALLER")' 2>/dev/null
}

ensure_trainer() {
    trainer_is_ready && return
    ensure_uv
    rm -rf "$venv"/lib/python*/site-packages/torch{,-*.dist-info} # of an install that was cut off
    step "install what torch requires" "$uv" pip install --quiet --python "$venv/bin/python" --require-hashes \
        --requirement "$root/deploy/torch/requirements.lock"
    step "install torch" "$uv" pip install --quiet --python "$venv/bin/python" \
        ${ROLLOUT_TORCH_INDEX:+--index-url "$ROLLOUT_TORCH_INDEX"} --requirement "$root/deploy/torch/torch.txt"
}

# --- separate environments ----------------------------------------------------------------------------------

# For programs whose pins conflict with this project's. Each is stamped with the fingerprint of what it was made from.

fingerprint_of() {
    cat "$@" | sha256sum | cut -d' ' -f1
}

environment_is_ready() {
    [[ -x $1/bin/python && -f $1/.installed && $(<"$1/.installed") == "$2" ]]
}

# begin_anew DIR: make an environment count as not installed. What an install left that was cut off goes first: uv takes a package
# for installed of which only some files are there.
begin_anew() {
    [[ -e $1/.installed ]] || rm -rf "$1"/lib/python*/site-packages
    rm -f "$1/.installed"
}

# install_apart WHAT: unless the environment in `env_dir` is that of `fingerprint`, call `install`, one at a time.
install_apart() {
    mkdir -p "$env_dir"
    exec 9>"$env_dir/.install.lock" # uv itself locks .lock
    flock 9
    environment_is_ready "$env_dir" "$fingerprint" || { install; echo "$fingerprint" >"$env_dir/.installed"; }
    echo "$1 in $env_dir"
}

# make_environment DIR LOCK...: install locks without their dependencies, then torch. Torch comes last and alone, so its
# index serves nothing else (except a GPU build's own libraries).
make_environment() {
    local environment=$1
    shift
    ensure_uv
    begin_anew "$environment"
    # With pip: vLLM lists its own packages when it is asked for its settings, and fails if it has neither pip nor uv.
    "$uv" venv --quiet --allow-existing --seed --python "$python" "$environment"
    "$uv" pip install --quiet --python "$environment/bin/python" --no-deps --require-hashes "${@/#/--requirement=}"
    "$uv" pip install --quiet --python "$environment/bin/python" \
        ${ROLLOUT_TORCH_INDEX:+--index-url "$ROLLOUT_TORCH_INDEX"} --requirement "$root/deploy/torch/torch.txt"
}

# newer_python [WANTED]: print a Python of this machine for programs that do not run on 3.11. Those that pyenv has installed come
# first: its own shims fail for each version that is not chosen.
newer_python() {
    local folder path=$PATH
    ensure_uv >/dev/null
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin; do
        path=$folder:$path
    done
    PATH=$path "$uv" python find "${1:->=3.12}" 2>/dev/null
}

# has_newer_python NAME [OLDEST]: say so if the tests of this program cannot run here; they are then skipped with the same reason.
has_newer_python() {
    local oldest=${2:-3.12}
    newer_python ">=$oldest" >/dev/null || { echo "==> without $1: it needs Python $oldest or newer, which this machine does not have" && false; }
}

# --- sandboxes and engines ----------------------------------------------------------------------------------

has_apptainer() {
    [[ -n ${ROLLOUT_APPTAINER:-} ]] || command -v apptainer >/dev/null || [[ -x /opt/apptainer/bin/apptainer ]]
}

# As root, also install the tools that build images, which a machine with its own Apptainer may lack.
ensure_apptainer() {
    has_apptainer && { [[ $(id -u) != 0 ]] || command -v mmdebstrap >/dev/null; } && return
    needs_admin Apptainer "$root/scripts/install-apptainer"
    step "install Apptainer" with_apt "$root/scripts/install-apptainer"
}

# An ordinary user needs subordinate ids (`newuidmap`) to install Debian packages into the image.
require_ids() {
    local command
    [[ $(id -u) != 0 ]] || return 0
    command=$("$venv/bin/python" -c 'import os, sandboxes.host.subordinate_ids as ids
if not ids.has_subordinate_ids(os.getuid()): print(ids.subordinate_ids_command())')
    [[ -z $command ]] || fail "to build the base image you need subordinate ids; an administrator gives them with:
    $command
or, without them: point ROLLOUT_IMAGES_DIR at a folder that has base.sif, such as the one of a user who built it"
}

images_folder() {
    echo "${ROLLOUT_IMAGES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/rollout-service/images}"
}

ensure_base_image() {
    local stamp=$cache/base-image fingerprint
    fingerprint=$(sha256sum <"$root/sandboxes/definitions/base.def")
    # An existing image is used, whoever built it. It is rebuilt if this checkout built it from another definition.
    [[ -e $(images_folder)/base.sif ]] && [[ ! -f $stamp || $(<"$stamp") == "$fingerprint" ]] && return
    require_ids
    ensure_uv # the image's Python packages may come through it
    step "build the base image" "$venv/bin/rollout-service" image build base
    echo "$fingerprint" >"$stamp"
}

# The image of examples/environments/calc_openai, whose environment.toml names the version of the package.
ensure_openai_image() {
    local package
    [[ ! -e $(images_folder)/openai.sif ]] || return 0
    package=$(grep --only-matching 'openai==[0-9.]*' "$root/examples/environments/calc_openai/environment.toml")
    require_ids
    ensure_uv
    step "build the image with $package" "$venv/bin/rollout-service" image build openai \
        --definition "$root/sandboxes/definitions/base.def" --arg "PYTHON_PACKAGES=$package"
}

# The libraries of bridges, each in its own environment. pyproject.toml names them.
ensure_bridges() {
    local missing library
    has_program bridges || needs_admin "a C compiler" "apt-get install ${debian_of[bridges]}"
    ensure_uv
    missing=$("$venv/bin/python" -c 'from rollout_service.cli.env.install import missing_bridges
for one in missing_bridges(): print(one.name, ".".join(map(str, one.python_version)), sep=">=")')
    for library in $missing; do
        has_newer_python "${library%>=*}" "${library#*>=}" || continue
        step "install ${library%>=*}" "$venv/bin/rollout-service" env install "${library%>=*}"
    done
    ensure_openenv
}

# OpenEnv, whose servers tests connect to; the service itself does not need the package.
ensure_openenv() {
    local environment=$cache/openenv requirements=$root/tests/support/openenv/requirements.lock
    environment_is_ready "$environment" "$(fingerprint_of "$requirements")" && return
    ensure_uv
    step "install openenv" install_openenv
}

install_openenv() {
    "$uv" venv --quiet --clear --python "$python" "$environment" &&
        "$uv" pip install --quiet --python "$environment/bin/python" --no-deps --require-hashes --requirement "$requirements" &&
        fingerprint_of "$requirements" >"$environment/.installed"
}

# swebench reads the logs of tests, in an environment of its own.
ensure_swebench() {
    "$venv/bin/python" -c 'import sys
from rollout_service.environments.swe.grading import SWEBENCH
sys.exit(not SWEBENCH.is_installed)' && return
    ensure_uv
    step "install swebench" "$venv/bin/rollout-service" env install swe
}

# The base of tasks that are made from releases of packages.
ensure_swe_base_image() {
    [[ ! -e $(images_folder)/swe-base.sif ]] || return 0
    require_ids
    ensure_uv
    step "build a base image with git and pytest" "$venv/bin/rollout-service" image build swe-base \
        --definition "$root/sandboxes/definitions/base.def" --arg DEBIAN_PACKAGES=git --arg PYTHON_PACKAGES=pytest==8.4.2
}

# Two small tasks of software repair, which tests roll out and grade.
ensure_swe() {
    local folder=$cache/swe fingerprint
    fingerprint=$(fingerprint_of "$root/benchmarks/swe_instances.py")
    ensure_swebench
    [[ -f $folder/.made && $(<"$folder/.made") == "$fingerprint" && -e $(images_folder)/swe-sqlparse-0.5.2.sif ]] && return
    ensure_uv
    ensure_swe_base_image
    export SWE_PIP_PYTHON=$pip_python
    step "make two tasks of software repair" "$venv/bin/python" "$root/benchmarks/swe_instances.py" "$folder" \
        --only sqlparse-0.5.2 --only cachetools-5.5.0
    echo "$fingerprint" >"$folder/.made"
}

# The programs that the tests run: most in one image, and OpenHands in its own. An image that is unchanged is not built again.
ensure_harnesses() {
    local stamp=$cache/harnesses fingerprint
    fingerprint=$(fingerprint_of "$root/sandboxes/definitions/base.def" "$root"/rollout_service/agents/harnesses/presets/*.toml)
    [[ -e $(images_folder)/test-harnesses.sif && -e $(images_folder)/openhands-sdk.sif && -f $stamp ]] &&
        [[ $(<"$stamp") == "$fingerprint" ]] && return
    require_ids
    ensure_uv
    step "build an image of agents' programs (2 GB)" "$venv/bin/rollout-service" image build test-harnesses \
        --harness codex --harness claude_code --harness qwen_code --harness opencode --harness gemini_cli \
        --harness mini_swe_agent --harness pi
    step "build the image of OpenHands (244 MB)" "$venv/bin/rollout-service" image build openhands-sdk
    echo "$fingerprint" >"$stamp"
}

# Programs of Debian packages: systemd-analyze checks the unit in deploy/systemd (systemd itself need not run), and with it
# come those that tests and Docker run and the smallest systems lack. A small build of Chromium without windows drives the
# dashboard, and reasoning-gym requires a library that has to be compiled.
declare -A program_of=([systemd]="systemd-analyze curl ip ps" [docker]=dockerd [browser]=chromium-headless-shell [bridges]=gcc
    [vllm]=g++)
declare -A debian_of=([systemd]="systemd curl iproute2 procps" [docker]=docker.io [browser]="chromium-headless-shell fonts-dejavu-core libatomic1"
    [bridges]="gcc libc6-dev python3-dev" [vllm]="g++ libnuma1")

has_program() {
    local name
    for name in ${program_of[$1]}; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$name" >/dev/null || return
    done
    case $1 in
        # What drives the browser needs the one, vLLM for CPUs the other, and the smallest systems lack both.
        browser) python3 -c 'import ctypes; ctypes.CDLL("libatomic.so.1")' 2>/dev/null ;;
        vllm) python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ;;
        bridges) [[ -e $("$(find_python)" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ;;
    esac
}

# Where several of the parts lack their program, apt installs all at once, which takes little longer than one.
ensure_programs() {
    local one missing=()
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 0
    for one in "${installing[@]}"; do
        [[ -z ${program_of[$one]:-} ]] || has_program "$one" || missing+=("$one")
    done
    # shellcheck disable=SC2046,SC2086 # lists of words
    ((${#missing[@]} == 0)) ||
        step "install ${missing[*]}" with_apt apt_install $(for one in "${missing[@]}"; do echo ${debian_of[$one]}; done)
}

ensure_systemd() {
    has_program systemd && return
    needs_admin systemd-analyze "apt-get install ${debian_of[systemd]}"
    # shellcheck disable=SC2086 # a list of words
    step "install systemd-analyze" with_apt apt_install ${debian_of[systemd]}
}

ensure_docker() {
    has_program docker && "$root/scripts/install-docker" >/dev/null && return
    needs_admin Docker "$root/scripts/install-docker"
    step "install Docker" with_apt "$root/scripts/install-docker"
}

ensure_browser() {
    has_program browser && return
    needs_admin "a browser for tests" "apt-get install ${debian_of[browser]}"
    # shellcheck disable=SC2086 # a list of words
    step "install a browser" with_apt apt_install ${debian_of[browser]}
}

ensure_redis() {
    [[ -x $cache/redis/bin/redis-server ]] && return
    step "find or unpack Redis" with_apt "$root/scripts/install-redis"
}

ensure_sglang() {
    [[ -f $root/.venv-sglang/.installed ]] && "$root/scripts/install-sglang" >/dev/null && return
    step "install SGLang for the CPU (2 GB)" "$root/scripts/install-sglang"
}

ensure_vllm() {
    has_program vllm || needs_admin "what vLLM needs" "apt-get install ${debian_of[vllm]}"
    [[ -f $root/.venv-vllm/.installed ]] && "$root/scripts/install-vllm" >/dev/null && return
    step "install vLLM for the CPU (3 GB)" "$root/scripts/install-vllm"
}

ensure_harbor() {
    [[ -f $root/.venv-harbor/.installed ]] && "$root/scripts/install-harbor" >/dev/null && return
    has_newer_python Harbor || return 0
    step "install Harbor (300 MB)" "$root/scripts/install-harbor"
}

ensure_trainers() {
    [[ -f $root/.venv-trainers/.installed ]] && "$root/scripts/install-trainers" >/dev/null && return
    step "install trainers for the CPU (4 GB)" "$root/scripts/install-trainers"
}

ensure_slurm() {
    [[ -f $cache/slurm/.installed ]] && "$root/scripts/install-slurm" >/dev/null && return
    step "unpack Slurm" with_apt "$root/scripts/install-slurm"
}

ensure_prometheus() {
    [[ -x $cache/prometheus/bin/promtool ]] && return
    step "find or unpack Prometheus" with_apt "$root/scripts/install-prometheus"
}

# ensure_carried NAME LOCK TEXT: install what packages carry, as a lock says, into a folder of the cache; nothing of them runs.
ensure_carried() {
    local folder=$cache/$1 requirements=$root/$2
    [[ -f $folder/.installed && $(<"$folder/.installed") == "$(fingerprint_of "$requirements")" ]] && return
    ensure_uv
    step "$3" install_carried
}

install_carried() {
    rm -rf "$folder" &&
        "$uv" pip install --quiet --python "$python" --target "$folder" --no-deps --require-hashes --requirement "$requirements" &&
        fingerprint_of "$requirements" >"$folder/.installed"
}

# The page that opens traces, for tests and for the script that takes the pictures of the documentation.
ensure_perfetto() { ensure_carried perfetto packaging/docs_site/perfetto.lock "install Perfetto's page (50 MB)"; }

ensure_valkey() { ensure_carried valkey tests/support/valkey.lock "install Valkey (4 MB)"; }

# An object store that speaks S3's API.
ensure_seaweedfs() { ensure_carried seaweedfs tests/support/store/seaweedfs.lock "install SeaweedFS (50 MB)"; }

# last_failed: print the tests that failed in this folder's last run of pytest, as arguments for the next one. To the name
# of a test in a group, pytest-xdist adds `@` and the group.
last_failed() {
    "$venv/bin/python" -c 'import json, re
for name in json.load(open(".pytest_cache/v/cache/lastfailed")):
    print(re.sub(r"@[^]@]*$", "", name))'
}

# shellcheck source=scripts/parts.sh
source "$root/scripts/parts.sh"
