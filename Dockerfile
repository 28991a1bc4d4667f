# docker build -t moesaic . && docker run --rm -v "$PWD:/work" -w /work moesaic doctor
FROM debian:bookworm-slim AS build
WORKDIR /src
COPY . .
RUN ./run packages && apt-get install -y --no-install-recommends dpkg-dev file && scripts/debian-package

FROM debian:bookworm-slim
COPY --from=build /src/build/package/*.deb /tmp/
COPY python/requirements.txt /tmp/
RUN apt-get update && apt-get install -y --no-install-recommends /tmp/*.deb python3-venv ca-certificates && \
    python3 -m venv /usr/share/moesaic/venv && /usr/share/moesaic/venv/bin/pip install --no-cache-dir --no-deps -r /tmp/requirements.txt && \
    rm -rf /tmp/*.deb /tmp/requirements.txt /var/lib/apt/lists/*
ENTRYPOINT ["moesaic"]
CMD ["--help"]
