# JupyterLab, and numba-cuda for its kernels, as in images that users run their notebooks in.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG UV_VERSION=0.13.8
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy
COPY notebook.txt ./
# uv's cache is this machine's.
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv==${UV_VERSION} \
 && /opt/uv/bin/uv venv --quiet --no-project /opt/notebook \
 && /opt/uv/bin/uv pip install --quiet --python /opt/notebook/bin/python --require-hashes -r notebook.txt \
 && rm -r /opt/uv
ENV PATH=/opt/notebook/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
CMD ["sleep", "infinity"]
