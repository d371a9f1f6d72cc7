# Serves on the CPU. Build and run, with a folder that jgr train or jgr convert wrote in ./model:
#   docker build -t jgr .
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/model:/model:ro" jgr /model
# With -p 8000:8000 other machines reach it, and without a key anybody may ask; the start warns of that. So give it keys
# (docs/serving.md), in a file that the container's user can read:
#   docker run -p 8000:8000 -v "$PWD/model:/model:ro" -v "$PWD/keys.json:/keys.json:ro" jgr /model \
#     --set server.keys=/keys.json
# One key for all is a secret of Docker, with -e JGR_SERVER__API_KEY_FILE=/run/secrets/api_key (docs/configuration.md).
FROM python:3.11-slim

WORKDIR /app
COPY requirements/runtime-py311.txt requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/runtime-py311.txt

COPY pyproject.toml README.md LICENSE ./
COPY jgr jgr
COPY configs configs
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && useradd --create-home jgr

USER jgr
EXPOSE 8000
# jgr listens on 127.0.0.1 unless told otherwise; inside the container that would reach nobody outside it. Who reaches it
# from there is up to docker run -p.
ENTRYPOINT ["jgr", "serve", "--set", "server.host=0.0.0.0"]
