# shellcheck shell=bash
# Sourced by the other scripts: `knit_setup` sets up what this checkout lacks, or returns at once if nothing is.
#
# It makes `.venv` in the checkout from the pins under requirements/ and installs knit into it (editable).
# The state "done" is one stamp, written last: a hash of everything that set-up depends on. Whatever ends a
# set-up before that (a full disk, a broken connection, kill -9), the next one goes on where it stopped.
# Simultaneous set-ups wait for each other. Other Pythons of the machine are left alone.
#
#   KNIT_FLAVOR=cpu|gpu   default: gpu where nvidia-smi lists a device
#   KNIT_PYTHON=PATH      the Python (3.11 or newer) to make .venv from; default: the first on PATH

KNIT_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
KNIT_VENV=$KNIT_ROOT/.venv
KNIT_LOG=$KNIT_ROOT/.setup.log
KNIT_STAMP=$KNIT_VENV/knit.stamp
KNIT_LOCK_TIMEOUT_S=3600

knit_setup() {
  local flavor stamp
  flavor=$(knit_flavor) || return
  stamp=$(knit_fingerprint "$flavor") || return
  [ "$(cat "$KNIT_STAMP" 2>/dev/null)" = "$stamp" ] && return
  command -v flock >/dev/null || { knit_lacks "the command flock (package util-linux)"; return 1; }
  ( # a subshell: the lock goes with it, and exit ends only the set-up
    if ! flock --nonblock 9; then
      knit_say "another set-up of this checkout is running; waiting for it"
      flock --timeout "$KNIT_LOCK_TIMEOUT_S" 9 || { knit_say "gave up after ${KNIT_LOCK_TIMEOUT_S} s"; exit 1; }
      [ "$(cat "$KNIT_STAMP" 2>/dev/null)" = "$stamp" ] && exit 0
    fi
    knit_install "$flavor" "$stamp"
  ) 9>"$KNIT_ROOT/.setup.lock"
}

knit_say() { printf 'knit set-up: %s\n' "$*" >&2; }
knit_lacks() { knit_say "this machine lacks $*"; }

knit_flavor() {
  case ${KNIT_FLAVOR:-} in
    cpu | gpu) printf '%s' "$KNIT_FLAVOR" ;;
    "") case $(nvidia-smi -L 2>/dev/null) in *"GPU 0"*) printf gpu ;; *) printf cpu ;; esac ;;
    *) knit_say "KNIT_FLAVOR=$KNIT_FLAVOR is neither cpu nor gpu"; return 2 ;;
  esac
}

# What the set-up depends on: flavour, place of the checkout, pins, packaging, this file.
knit_fingerprint() {
  {
    printf '%s\n%s\n' "$1" "$KNIT_ROOT"
    cat "$KNIT_ROOT"/requirements/*.txt "$KNIT_ROOT"/setup.py "$KNIT_ROOT"/scripts/_setup.sh
    find "$KNIT_ROOT/third_party" -type f \( -name '*.py' -o -name '*.toml' \) -print0 | LC_ALL=C sort -z | xargs -0 cat
  } | sha256sum | sed "s/ .*/ $1/"
}

knit_install() {
  local flavor=$1 stamp=$2 previous python
  previous=$(cut -s -d' ' -f2 "$KNIT_STAMP" 2>/dev/null)
  if [ -n "$previous" ] && [ "$previous" != "$flavor" ]; then
    knit_say ".venv was made for $previous hosts, this is a set-up for $flavor: remove it (rm -r .venv) or set KNIT_FLAVOR=$previous"
    return 1
  fi
  knit_check_disk "$flavor" || return
  python=$(knit_find_python) || return
  knit_check_compiler "$python" || return
  : >"$KNIT_LOG"
  knit_system_libraries "$python"
  knit_make_venv "$python" || return
  printf 'unfinished %s\n' "$flavor" >"$KNIT_STAMP"
  "knit_packages_$flavor" || return
  knit_pip "installing knit" --no-deps --no-build-isolation --editable "$KNIT_ROOT" || return
  printf '%s\n' "$stamp" >"$KNIT_STAMP.new" && mv "$KNIT_STAMP.new" "$KNIT_STAMP" && knit_say "done"
}

# Disk still needed = what a whole environment needs, less what .venv already holds.
knit_check_disk() {
  local needed_gb=8 free_kb used_kb=0 missing_kb
  [ "$1" = gpu ] && needed_gb=40
  free_kb=$(df -Pk "$KNIT_ROOT" | awk 'NR == 2 {print $4}')
  [ -d "$KNIT_VENV" ] && used_kb=$(du -sk "$KNIT_VENV" | cut -f1)
  missing_kb=$((needed_gb * 1048576 - used_kb - free_kb))
  [ "$missing_kb" -le 0 ] && return
  knit_lacks "disk space: $1 hosts need $needed_gb GB for .venv, $((free_kb / 1048576)) GB are free in $KNIT_ROOT"
  return 1
}

knit_find_python() {
  local candidate found=""
  local -a candidates=(python3.11 python3.12 python3.13 python3 python)
  [ -n "${KNIT_PYTHON:-}" ] && candidates=("$KNIT_PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
        command -v "$candidate"
        return
      fi
      found="$candidate without its venv module (Debian, Ubuntu: package python3-venv)"
    else
      : "${found:=$("$candidate" --version 2>/dev/null)}"
    fi
  done
  knit_lacks "Python 3.11 or newer (looked for ${candidates[*]}; found ${found:-none}); install one or set KNIT_PYTHON"
  return 1
}

# pycosat, which the quickstart's tasks import, is published as source only.
knit_check_compiler() {
  local include
  command -v cc >/dev/null || command -v gcc >/dev/null || {
    knit_lacks "a C compiler, which a package needs (Debian, Ubuntu: apt-get install build-essential)"
    return 1
  }
  include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$include/Python.h" ] || {
    knit_lacks "the C headers of $1 (Debian, Ubuntu: package $(basename "$1")-dev)"
    return 1
  }
}

# Shared libraries of the Mooncake store. Everything else runs without them, so their absence is said, not fatal.
knit_system_libraries() {
  local -a missing=() as_root=()
  local file package
  while read -r file package; do
    "$1" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$file" 2>/dev/null || missing+=("$package")
  done <<<"libibverbs.so.1 libibverbs1
libnuma.so.1 libnuma1
libcurl.so.4 libcurl4"
  [ ${#missing[@]} -eq 0 ] && return
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    knit_say "installing system libraries: ${missing[*]}"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive bash -c '
      install() { apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"; }
      install "$@" || { apt-get -o DPkg::Lock::Timeout=300 update && install "$@"; }
    ' apt "${missing[@]}" >>"$KNIT_LOG" 2>&1 </dev/null && return
  fi
  knit_lacks "${missing[*]} and apt-get could not install them: the Mooncake store will not start, all else works"
}

knit_make_venv() {
  if [ -d "$KNIT_VENV" ]; then
    # A package is whole when pip has written INSTALLER and RECORD, its last acts. What is not, is installed again;
    # what pip was replacing lies in folders that start with ~.
    local info
    for info in "$KNIT_VENV"/lib/python3*/site-packages/*.dist-info; do
      [ -f "$info/INSTALLER" ] && [ -f "$info/RECORD" ] || rm -rf "$info"
    done
    rm -rf "$KNIT_VENV"/lib/python3*/site-packages/~*
    # Reusable: made at this very place (its scripts name it), recent enough, and with a pip that runs.
    grep -qF "$KNIT_VENV" "$KNIT_VENV/bin/activate" 2>/dev/null &&
      "$KNIT_VENV/bin/python" -I -c 'import sys, pip._internal.cli.main; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
      return
  fi
  knit_step "making .venv with $("$1" --version)" "$1" -I -m venv --clear "$KNIT_VENV"
}

knit_packages_cpu() {
  local source
  knit_pip "installing $(grep -c == "$KNIT_ROOT/requirements/cpu.txt") packages (3.3 GB; minutes; details in .setup.log)" \
    --no-deps --requirement "$KNIT_ROOT/requirements/cpu.txt" || return
  # Nothing to do for a CPU build of torch; a CUDA build gets the CUDA libraries it is linked against.
  knit_pip "completing torch" "$(grep '^torch==' "$KNIT_ROOT/requirements/cpu.txt")" || return
  source=$(mktemp -d) || return # built from a copy, which keeps the checkout clean
  cp -R "$KNIT_ROOT/third_party/sglang_kernel_cpu/." "$source"
  knit_pip "installing the stand-in for sglang-kernel" --no-deps --no-build-isolation --force-reinstall "$source"
  local status=$?
  rm -rf "$source"
  return $status
}

knit_packages_gpu() {
  knit_pip "installing SGLang, Megatron-core and what they need (about 25 GB; details in .setup.log)" \
    --requirement "$KNIT_ROOT/requirements/gpu.txt" || return
  command -v nvcc >/dev/null || {
    knit_lacks "nvcc to compile Transformer Engine, so training will run Megatron's own layers; once the CUDA toolkit" \
      "is on PATH: .venv/bin/pip install --no-build-isolation -r requirements/gpu-build.txt"
    return 0
  }
  knit_pip "compiling Transformer Engine (tens of minutes)" \
    --no-build-isolation --requirement "$KNIT_ROOT/requirements/gpu-build.txt"
}

# pip of .venv, blind (-I) to PYTHONPATH and user packages.
knit_pip() {
  local what=$1
  shift
  knit_step "$what" env -u PIP_TARGET -u PIP_PREFIX -u PIP_REQUIREMENT PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$KNIT_VENV/bin/python" -I -m pip install --no-input "$@"
}

# knit_step WHAT COMMAND…: says what, logs the output, shows the end of it when the command fails.
knit_step() {
  knit_say "$1"
  shift
  "$@" >>"$KNIT_LOG" 2>&1 </dev/null && return
  grep -v 'WARNING: Location\|Retry(total=[1-9]\|^Looking in \|^\[notice\]' "$KNIT_LOG" | tail -n 8 | cut -c1-400 >&2
  knit_say "that failed; its output ends above and stands in $KNIT_LOG. Run the command again to go on from here"
  return 1
}
