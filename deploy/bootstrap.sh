# Sourced by ./deploy/up and ./deploy/test; needs bash and ROOT (the clone). Sets up this machine, once:
#   a virtual environment in the clone with the exact lock of dependencies, and RabbitMQ.
# Afterwards PYTHON is the interpreter to use. Nothing that already runs is touched; no service is started.
# Told by the environment: RELAY_DRAIN_PYTHON (an interpreter), RELAY_DRAIN_VENV (a folder, default .venv).

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

new_enough() { "$1" -c 'import ssl, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${RELAY_DRAIN_PYTHON:-}" ]; then
    new_enough "$RELAY_DRAIN_PYTHON" || fail "RELAY_DRAIN_PYTHON=$RELAY_DRAIN_PYTHON is no Python 3.11 or newer"
    printf '%s\n' "$RELAY_DRAIN_PYTHON"
    return
  fi
  # A shim of pyenv is on the PATH also for versions that are not active: it is asked, then the versions themselves.
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-4]*/bin/python3 \
    /opt/homebrew/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "Python 3.11 or newer is needed and was not found; name one with RELAY_DRAIN_PYTHON=/path/to/python3"
}

# What the environment is made of; when any of it changes, it is made anew.
fingerprint() { { printf '%s\n' "$VENV" "$ROOT"; cat "$ROOT/requirements/dev.lock"; } | cksum; }

is_root() { [ "$(id -u)" = 0 ]; }

apt_updated=no
apt_install() {
  if [ "$apt_updated" = no ]; then
    apt-get -qq -o DPkg::Lock::Timeout=120 update >&2 || fail "apt-get update failed"
    apt_updated=yes
  fi
  # needrestart, where it is installed, would restart services of this machine.
  NEEDRESTART_SUSPEND=1 DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=120 --no-install-recommends install "$@" >&2 \
    </dev/null || fail "apt-get install $* failed"
}

make_venv() {
  local base version
  base=$(find_python)
  version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if ! "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    # Debian and Ubuntu ship Python without the module that puts pip into a virtual environment.
    if is_root && command -v apt-get >/dev/null; then
      say "installing python$version-venv"
      apt_install "python$version-venv"
    else
      fail "$base lacks the modules venv and ensurepip: apt-get install python$version-venv (as root), or name" \
        "another interpreter with RELAY_DRAIN_PYTHON"
    fi
  fi
  say "making $VENV with Python $version"
  rm -rf "$VENV"
  "$base" -m venv "$VENV" >&2
  # Wheels only, of exactly these hashes; then the project itself, whose dependencies are all there.
  "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -qq --only-binary :all: \
    --require-hashes -r "$ROOT/requirements/dev.lock" >&2 || fail "the locked dependencies could not be installed"
}

# The console scripts and the version of an editable installation, without a build: that would need more than the lock.
link_project() {
  "$VENV/bin/python" - "$ROOT" <<'PYTHON' >&2
import shutil, sys, sysconfig, tomllib
from pathlib import Path

root = Path(sys.argv[1])
project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
site = Path(sysconfig.get_path("purelib"))
(site / "relay_drain.pth").write_text(f"{root}\n", encoding="utf-8")
for old in site.glob("relay_drain-*.dist-info"):
    shutil.rmtree(old)
info = site / f"relay_drain-{project['version']}.dist-info"
info.mkdir()
metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
(info / "METADATA").write_text(metadata, encoding="utf-8")
(info / "INSTALLER").write_text("deploy/bootstrap.sh\n", encoding="utf-8")
for name, target in project["scripts"].items():
    module, function = target.split(":")
    script = Path(sysconfig.get_path("scripts")) / name
    # As pip does it: the first line of a script can not hold a path with a space, a shell's argument can.
    start = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
    script.write_text(f"{start}import sys\nfrom {module} import {function}\nsys.exit({function}())\n", encoding="utf-8")
    script.chmod(0o755)
PYTHON
}

have_rabbitmq() {
  local folder
  for folder in /usr/lib/rabbitmq/bin /opt/homebrew/opt/rabbitmq/sbin /usr/local/opt/rabbitmq/sbin \
    /home/linuxbrew/.linuxbrew/opt/rabbitmq/sbin; do
    if [ -x "$folder/rabbitmq-server" ]; then return 0; fi
  done
  command -v rabbitmq-server >/dev/null 2>&1
}

install_rabbitmq() {
  if is_root && command -v apt-get >/dev/null; then
    say "installing RabbitMQ by apt (its service is not started)"
    local policy=/usr/sbin/policy-rc.d made_policy=no mappers mapper
    mappers=$(pgrep -x epmd || true)
    if [ ! -e "$policy" ]; then
      # Debian's agreed way to say that an installation may start no service. One that is there already stays.
      printf '#!/bin/sh\nexit 101\n' >"$policy"
      chmod 755 "$policy"
      made_policy=yes
      trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    apt_install rabbitmq-server
    if [ "$made_policy" = yes ]; then
      rm -f "$policy"
      trap - EXIT
    fi
    # Installed for its programs: without this it would start with the next boot.
    if command -v systemctl >/dev/null; then systemctl disable --quiet rabbitmq-server.service >/dev/null 2>&1 || true; fi
    # The package's script leaves Erlang's port mapper behind; only one that was not there before is ended.
    for mapper in $(pgrep -x epmd || true); do
      case " $(echo $mappers) " in
        *" $mapper "*) ;;
        *) kill "$mapper" 2>/dev/null || true ;;
      esac
    done
  elif command -v brew >/dev/null; then
    say "installing RabbitMQ by brew (its service is not started)"
    brew install rabbitmq >&2 </dev/null || fail "brew install rabbitmq failed"
  else
    fail "RabbitMQ is needed and was not found: apt-get install rabbitmq-server (as root), or brew install rabbitmq"
  fi
  have_rabbitmq || fail "RabbitMQ was installed, but rabbitmq-server is in no place that is known"
}

bootstrap() {
  VENV=${RELAY_DRAIN_VENV:-$ROOT/.venv}
  PYTHON=$VENV/bin/python
  export PYTHONUTF8=1
  local made=$VENV/.made linked=$VENV/.linked now
  now=$(fingerprint)
  if ! { [ -f "$made" ] && [ "$(cat "$made")" = "$now" ] && "$PYTHON" -c '' 2>/dev/null; }; then
    make_venv
    printf '%s\n' "$now" >"$made"
  fi
  now=$(cksum <"$ROOT/pyproject.toml")
  if ! { [ -f "$linked" ] && [ "$(cat "$linked")" = "$now" ]; }; then
    link_project
    printf '%s\n' "$now" >"$linked"
  fi
  if ! have_rabbitmq; then install_rabbitmq; fi
}
