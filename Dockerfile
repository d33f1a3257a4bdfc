# The HTTP service as an image.
#
#   docker build -t cliquetta .                            # CPU
#   docker build -t cliquetta:cuda --build-arg TORCH=cuda .
#
#   docker run --rm --read-only --tmpfs /tmp -p 127.0.0.1:8765:8765 \
#     -v cliquetta-sessions:/sessions -v "$PWD/weights:/weights:ro" \
#     -e CLIQUETTA_TOKEN="$(openssl rand -hex 24)" cliquetta
#
# Everything is installed from the locks in constraints/, with hashes. Weights are not part of the
# image: mount them and name them, as in `... cliquetta serve --model b16=/weights/ViT-B-16.pt ...`.
FROM python:3.11-slim AS build
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /opt/cliquetta
ENV PATH=/opt/cliquetta/bin:$PATH
COPY constraints/torch.txt constraints/torch-cpu.txt constraints/cuda.txt constraints/serve.txt constraints/
RUN if [ "$TORCH" = cpu ]; then \
      pip install --require-hashes --no-deps \
        --extra-index-url https://download.pytorch.org/whl/cpu -r constraints/torch-cpu.txt; \
    else \
      pip install --require-hashes --no-deps -r constraints/torch.txt -r constraints/cuda.txt; \
    fi
RUN pip install --require-hashes --no-deps -r constraints/serve.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
LABEL org.opencontainers.image.title="CliqueTTA" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/cliquetta /opt/cliquetta
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin cliquetta \
 && install -d -o 10001 -g 10001 -m 0700 /sessions \
 && install -d /weights
# Nothing is written but sessions and, where a library insists, /tmp.
ENV PATH=/opt/cliquetta/bin:$PATH HOME=/tmp XDG_CACHE_HOME=/tmp CLIQUETTA_CACHE=/weights \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /sessions
VOLUME ["/sessions", "/weights"]
EXPOSE 8765
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8765/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["cliquetta"]
# Without a token (CLIQUETTA_TOKEN or --token-file) it does not start: the port is open to others. micro
# is the bundled toy: name the model of your images instead.
CMD ["serve", "--model", "micro", "--host", "0.0.0.0", "--port", "8765", "--sessions", "/sessions", "--log-format", "json"]
