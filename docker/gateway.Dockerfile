# The gateway: OpenAI's HTTP API over a server elsewhere. No vLLM, no torch. docker/README.md says how to build and run it.
ARG GATEWAY_BASE_IMAGE=debian:bookworm-slim

# hadolint ignore=DL3006
FROM ${GATEWAY_BASE_IMAGE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The base decides which versions apt has: none can be named here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tritonstream
WORKDIR /opt/tritonstream

FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY requirements/gateway.txt requirements/gateway.txt
# The secret is a pip.conf, for who needs one: it leads to packages, and is in no layer.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv .venv \
    && .venv/bin/pip install --no-deps -r requirements/gateway.txt \
    && .venv/bin/pip uninstall --yes pip setuptools
COPY client/tritonstream lib/tritonstream
COPY gateway/tritonstream_gateway lib/tritonstream_gateway
RUN python3 -m compileall -q lib

FROM base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/opt/tritonstream/lib \
    PYTHONUNBUFFERED=1 \
    TRITONSTREAM_GATEWAY_HOST=0.0.0.0
COPY --from=build /opt/tritonstream/.venv .venv
COPY --from=build /opt/tritonstream/lib lib
COPY tools/health.py health.py
USER 10001:10001
EXPOSE 9000
HEALTHCHECK --interval=10s --timeout=10s --retries=3 --start-period=60s \
    CMD [".venv/bin/python", "-I", "-S", "health.py", "gateway"]
# The first process itself takes the signals: SIGTERM drains.
ENTRYPOINT [".venv/bin/python", "-m", "tritonstream_gateway"]
CMD ["serve"]
