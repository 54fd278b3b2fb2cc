#!/usr/bin/env bash
# Drains the Envoy of this pod: tells callers to go elsewhere (GOAWAY), and returns when no request is open any more. Who
# calls it bounds the time. The image has bash, and nothing that speaks HTTP: so bash does.
#   drain.sh [port of the admin interface]
set -euo pipefail
port=${1:-9901}

ask() { # METHOD PATH: print the answer
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

ask POST '/healthcheck/fail' >/dev/null
ask POST '/drain_listeners?graceful&skip_exit' >/dev/null
sleep 5 # who routes by readiness hears of it, and what is on its way arrives
while ask GET '/stats?filter=^http.grpc.downstream_rq_active$' | grep -q 'downstream_rq_active: [1-9]'; do
  sleep 1
done
