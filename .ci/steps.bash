# Functions for .ci/run and .ci/nightly, which source this file:
#
#   step NAME COMMAND...    run a step; its output is printed as it comes
#   start NAME COMMAND...   run a step beside those that follow; its output is printed when it ends
#   finish NAME...          wait for steps that were started
#   finish_all              wait for all of them, and print the seconds of the whole
#
# Each step prints its name, its seconds, and the CPU seconds of its processes without daemons. The first step that fails
# ends the script, with the output and the exit code of that step; steps that still run are killed. No step reads from
# standard input.
export OMP_NUM_THREADS=1
export TORCHINDUCTOR_COMPILE_THREADS=1  # without a pool of processes, each of which imports torch
unset PYTHONDONTWRITEBYTECODE  # every process would compile all modules of kairos again
export UV_COMPILE_BYTECODE=0  # most modules of the packages are never imported; Python compiles the others at first use
bin="${UV_PROJECT_ENVIRONMENT:-.venv}/bin"
declare -A running=()  # process id of each step that runs: its name
declare -A began=()    # name of each step: when it began
declare -A finished=()
foreground=""          # the step whose output is printed as it comes
outputs="$(mktemp -d)"
set -m  # a process group for each step, which can be killed with everything that the step has started
trap 'end_steps; rm -rf "$outputs"' EXIT

end_steps() {
  local process
  for process in "${!running[@]}"; do
    kill -TERM -- "-$process" 2>/dev/null || continue
    printf '== %s: ended early\n' "${running[$process]}" >&2
  done
  for _ in {1..50}; do
    for process in "${!running[@]}"; do
      kill -0 -- "-$process" 2>/dev/null && sleep 0.1 && continue 2
    done
    break
  done
  for process in "${!running[@]}"; do kill -KILL -- "-$process" 2>/dev/null || true; done
  if declare -F clean_up >/dev/null; then clean_up || true; fi
}

output_of() {
  printf '%s/%s' "$outputs" "${1// /_}"
}

begin() {
  local name="$1"
  shift
  [ -z "${began[$name]:-}" ] || { printf 'two steps have the name %s\n' "$name" >&2; exit 2; }
  began[$name]=$SECONDS
  if [ "$name" = "$foreground" ]; then
    (record_cpu "$name" && "$@") </dev/null &
  else
    (record_cpu "$name" && "$@") </dev/null >"$(output_of "$name")" 2>&1 &
  fi
  running[$!]="$name"
}

# at its end, a step writes the CPU time of its own process and of its children
record_cpu() {
  trap "times >'$(output_of "$1").cpu'" EXIT
}

cpu_seconds() {
  awk '{ for (i = 1; i <= NF; i++) { split($i, time, /[ms]/); total += 60 * time[1] + time[2] } }
       END { printf "%.0f", total }' "$(output_of "$1").cpu" 2>/dev/null || printf '?'
}

step() {
  foreground="$1"
  printf '== %s\n' "$1"
  begin "$@"
  finish "$1"
}

start() {
  printf '== %s: started\n' "$1"
  begin "$@"
}

finish() {
  local name
  for name in "$@"; do
    [ -n "${began[$name]:-}" ] || { printf 'no step has the name %s\n' "$name" >&2; exit 2; }
    while [ -z "${finished[$name]:-}" ]; do end_of_next; done
  done
}

finish_all() {
  finish "${!began[@]}"
  printf '== all: %d s\n' $SECONDS
}

# wait until a step ends, whichever it is
end_of_next() {
  local process="" status=0 name seconds
  wait -n -p process || status=$?
  name="${running[$process]}"
  seconds=$((SECONDS - began[$name]))
  unset "running[$process]"
  finished[$name]=1
  if [ "$name" != "$foreground" ]; then
    printf '== %s, beside other steps\n' "$name"
    cat "$(output_of "$name")"
  fi
  if [ "$status" -ne 0 ]; then
    printf '== %s: failed with exit code %d after %d s\n' "$name" "$status" "$seconds" >&2
    exit "$status"
  fi
  printf '== %s: %d s, %s s of CPU\n' "$name" "$seconds" "$(cpu_seconds "$name")"
}

# tests of pages skip where there is no browser
install_browser() {
  command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
    || printf 'warning: chromium is missing and cannot be installed\n' >&2
}
