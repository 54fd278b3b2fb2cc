# Stand-ins, from Debian's packages, for the images of others in docker/compose.yaml, where no registry can be reached.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus prometheus-alertmanager redis-server wget \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=65534 --group=65534 /prometheus /alertmanager
USER 65534:65534
