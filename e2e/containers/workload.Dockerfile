# The workload that shares a card in the tests: Python and clients of the driver's two libraries.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG UV_VERSION=0.13.8
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv==${UV_VERSION}
COPY pyproject.toml uv.lock ./
RUN python3 -m venv --without-pip /opt/workload \
 && /opt/uv/bin/uv export --quiet --frozen --no-hashes --no-emit-project --all-extras --all-groups -o locked.txt \
 && /opt/uv/bin/uv pip install --quiet --no-cache --python /opt/workload/bin/python -c locked.txt \
      cuda-bindings nvidia-ml-py

FROM ${BASE}
# The tests of development machines run an SSH server in the pod.
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends openssh-server > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd \
 && useradd --create-home --shell /bin/bash --password '*' dev
COPY --from=build /opt/workload /opt/workload
ENV PATH=/opt/workload/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
CMD ["sleep", "infinity"]
