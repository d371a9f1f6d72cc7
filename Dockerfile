# Serves on the CPU. Build and run, with a folder that jgr train or jgr convert wrote in ./model:
#   docker build -t jgr .
#   docker run --stop-timeout 60 -p 127.0.0.1:8000:8000 -v "$PWD/model:/model:ro" jgr /model
# With -p 8000:8000 other machines reach it, and without a key anybody may ask; the start warns of that. So give it keys
# (docs/serving.md), in a file that the container's user, 10001, can read:
#   docker run --stop-timeout 60 -p 8000:8000 -v "$PWD/model:/model:ro" -v "$PWD/keys.json:/keys.json:ro" jgr /model \
#     --set server.keys=/keys.json
# One key for all is a secret of Docker, with -e JGR_SERVER__API_KEY_FILE=/run/secrets/api_key (docs/configuration.md).
FROM python:3.11-slim

WORKDIR /app
COPY requirements/runtime-py311.txt requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/runtime-py311.txt

COPY pyproject.toml setup.py README.md LICENSE ./
COPY jgr jgr
COPY configs configs
# The folder for compiled programs is there, and the user's, before a volume is mounted on it.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --create-home --uid 10001 jgr \
    && install --directory --owner=jgr --group=jgr /home/jgr/.cache /home/jgr/.cache/jgr

USER 10001
ENV HOME=/home/jgr
EXPOSE 8000
# 503 until every program is compiled, and while it drains. Who sets server.port, TLS or server.open_health sets this too.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
# jgr listens on 127.0.0.1 unless told otherwise; inside the container that would reach nobody outside it. Who reaches it
# from there is up to docker run -p.
ENTRYPOINT ["jgr", "serve", "--set", "server.host=0.0.0.0"]
