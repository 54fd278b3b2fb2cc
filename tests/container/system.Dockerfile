# A base laid out as NVIDIA's images of Triton with vLLM are, where these cannot be had: tritonserver with its backends in
# /opt/tritonserver, vLLM in the system's own Python. Its pieces are those of the server's image.
ARG SERVER_IMAGE
# hadolint ignore=DL3006
FROM ${SERVER_IMAGE} AS server

# hadolint ignore=DL3006
FROM ${SERVER_IMAGE}
# As the bases are that it stands for.
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN rm -rf /opt/tritonstream /cache && userdel tritonstream
COPY --from=server /opt/tritonstream/.venv/lib/python3.11/site-packages /usr/local/lib/python3.11/dist-packages
RUN packages=/usr/local/lib/python3.11/dist-packages; \
    mkdir /opt/tritonserver; \
    mv "$packages"/pytriton/tritonserver/{bin,backends} "$packages/nvidia_pytriton.libs" /opt/tritonserver/; \
    mv "$packages/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub" \
      /opt/tritonserver/backends/python/; \
    chmod +x /opt/tritonserver/backends/python/triton_python_backend_stub; \
    rm -rf "$packages"/pytriton "$packages"/nvidia_pytriton-*
ENV LD_LIBRARY_PATH=/opt/tritonserver/nvidia_pytriton.libs \
    PATH=/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
HEALTHCHECK NONE
ENTRYPOINT []
