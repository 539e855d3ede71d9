# TensorFlow and PyTorch without CUDA: they prove that processes find each other and talk.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
# `python3` has PyTorch with gloo.
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-torch > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
# `/opt/tensorflow/bin/python3` has TensorFlow. Its requirements conflict with fenka's, so they are not in uv.lock.
ARG UV_VERSION=0.13.8
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv==${UV_VERSION} \
 && /opt/uv/bin/uv venv --quiet --no-project /opt/tensorflow \
 && /opt/uv/bin/uv pip install --quiet --python /opt/tensorflow/bin/python \
      --exclude-newer 2026-11-01 tensorflow-cpu==2.21.0 \
 && rm -r /opt/uv
# Since Python 3.11 iterating over a Flag leaves out 0, which torchrun 1.13 has as its default and then does not find.
RUN sed -i 's/^\( *for s in \)Std:$/\1(Std.NONE, *Std):/' \
      /usr/lib/python3/dist-packages/torch/distributed/elastic/multiprocessing/api.py \
 && python3 -c 'from torch.distributed.elastic.multiprocessing import Std; assert Std.from_str("0") == Std.NONE'
CMD ["sleep", "infinity"]
