# One image for relay, drain and the migration:      docker build .
# The same with the APNs simulator and the demo:     docker build --target demo .
# Works with the classic builder and with BuildKit. Pin the base by digest with
#   --build-arg PYTHON_IMAGE=python:3.13-slim@sha256:...
ARG PYTHON_IMAGE=python:3.13-slim

# ---------------------------------------------------------------- build: the only stage that uses a shell or an index
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/build.lock requirements/run.lock requirements/
# Wheels only, of exactly these hashes. The environment has no pip of its own: nothing is installed at run time.
RUN pip install --quiet --only-binary :all: --require-hashes -r requirements/build.lock \
 && python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv/bin/python install --quiet --only-binary :all: --require-hashes -r requirements/run.lock
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY relay relay
COPY drain drain
COPY migrations migrations
RUN pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/venv/bin/python install --quiet --no-deps --no-index /wheels/*.whl \
 && mkdir -m 700 /state

# --------------------------------------------------------------------------------------------------------------- run
FROM ${PYTHON_IMAGE} AS run
ARG BUILD_COMMIT=unknown
# PYTHONSAFEPATH: the working directory is no place to import from.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    LOG_FORMAT=json PROBE_HOST=0.0.0.0 BUILD_COMMIT=${BUILD_COMMIT}
COPY --from=build /opt/venv /opt/venv
USER 65532:65532
WORKDIR /tmp
EXPOSE 9464 9465
ENTRYPOINT ["python", "-m"]
CMD ["relay", "run"]

# -------------------------------------------------------------------------------------------------------------- demo
FROM run AS demo
ENV PYTHONPATH=/opt/demo
COPY --from=build --chown=65532:65532 /state /state
COPY deploy /opt/demo/deploy
CMD ["deploy.simulator"]

# ------------------------------------------------------- what `docker build .` makes: the last stage, without the demo
FROM run AS relay-drain
