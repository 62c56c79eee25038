# The server: `tepal server`, which keeps a SuperLink running and resumes interrupted runs.
#
#     docker build -f docker/server.Dockerfile -t tepal-server .
#
# Runs with a read-only root: state is in /app/state; /tmp must be a tmpfs.
# Needs Docker Engine 25 or newer, for the start interval of its health check.
#
# Build arguments; an empty one leaves pip's default.
#   PYTHON_IMAGE        base image of all stages, with Python 3.11 or newer and useradd
#   EXTRAS              extras of pyproject.toml, separated by commas: vision,text
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL   as pip reads them. Without passwords: they can be read from the image
#   TORCH_INDEX_URL     an additional index for TORCH_SPEC. Builds of torch for CPUs and for each CUDA version are often
#                       in separate indexes; the default one may install CUDA: several GB
#   TORCH_SPEC          the version of torch, as in constraints.txt; with vision: "torch torchvision", from one index
#   VERSION, REVISION   for the image's labels
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# Both Dockerfiles are identical up to the next line of dashes, so these layers are built and stored once. -------------
FROM ${PYTHON_IMAGE} AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
ARG TORCH_SPEC=torch
ARG EXTRAS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_PYTHON=/opt/venv/bin/python
RUN python -m venv --without-pip /opt/venv
WORKDIR /build
# Dependencies are installed for an empty project first, so that a change of code does not install torch again.
COPY pyproject.toml constraints.txt LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir tepal && touch tepal/__init__.py && \
    install="pip install -q --no-compile -c constraints.txt" && \
    $install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} $TORCH_SPEC && \
    $install ".${EXTRAS:+[$EXTRAS]}" && \
    pip check && pip uninstall -q -y tepal
# torch and torchvision of different builds can be installed together, but fail at import.
RUN cd /opt/venv && bin/python -B -c 'import torch' && \
    if [ -d lib/python3*/site-packages/torchvision ]; then bin/python -B -c 'import torchvision'; fi
# Not needed at run time: installers and build tools (uv of Flower, setuptools of torch), test suites, and torch's
# headers and C++ test programs.
RUN pip uninstall -q -y setuptools uv && cd /opt/venv/lib/python3*/site-packages && \
    rm -rf torch/test torch/include torch/share && \
    find torch/bin -type f ! -name torch_shm_manager -delete && \
    for package in Crypto fsspec joblib networkx numpy pandas pyarrow scipy sklearn sympy; do \
        [ ! -d "$package" ] || find "$package" -type d \( -name tests -o -name SelfTest \) -prune -exec rm -rf {} +; \
    done
# Compiled here, because with a read-only root every start would compile again; unchecked, because the sources' times
# may change when they are copied into an image. A few files are for other versions of Python and cannot be compiled.
RUN /opt/venv/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/venv/lib || true

FROM dependencies AS project
COPY . /opt/tepal
RUN --mount=type=cache,target=/root/.cache/pip \
    chmod -R a+rX /opt/tepal && pip install -q --no-deps --no-compile --prefix /opt/project /opt/tepal && \
    cd /opt/project/lib/python3*/site-packages/tepal/models/weights && weights="/opt/weights/${PWD#/opt/project/}" && \
    mkdir -p "$weights" && mv ./*/ "$weights" && cd / && \
    python -m compileall -q --invalidation-mode unchecked-hash /opt/project/lib && \
    rm -r /opt/tepal/tools && find /opt/tepal/tepal -type l -delete  # the rest is the app bundle that clients receive

FROM ${PYTHON_IMAGE}
# Nothing is installed in this stage, so pip and the wheels of ensurepip are removed. The standard library is compiled
# for the reason above.
RUN python -m pip uninstall -q -y --root-user-action=ignore setuptools wheel pip && \
    python -c 'import ensurepip, shutil; shutil.rmtree(ensurepip.__path__[0])' && rm -rf /usr/share/python-wheels && \
    python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("stdlib"), quiet=2, workers=0)'
RUN groupadd --gid 49999 app && \
    useradd --uid 49999 --gid app --home-dir /app --no-create-home --shell /usr/sbin/nologin --no-log-init app
COPY --from=dependencies /opt/venv /opt/venv
# Trained weights have a layer of their own, so that a change of code does not store and send them again.
COPY --from=project /opt/weights /opt/venv
COPY --from=project /opt/project /opt/venv
# No telemetry, update checks or downloads by Flower and its dependencies.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FLWR_HOME=/app/state/flower \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HUB_OFFLINE=1
# ----------------------------------------------------------------------------------------------------------------------
# The files of the app that is submitted; Flower makes its bundle from them.
COPY --from=project /opt/tepal /opt/tepal
# A new volume gets the owner of the folder on which it is first mounted. Those in provision/ are for the service of
# compose.yml that makes all credentials and writes each part to a separate volume.
RUN install -d -o app -g app /app/credentials /app/state /app/state/runs /app/provision && cd /app/provision && \
    install -d -o app -g app ca server sites sites/site-1 sites/site-2 sites/site-3
ENV TEPAL_CREDENTIALS=/app/credentials \
    TEPAL_STATE=/app/state \
    TEPAL_APP=/opt/tepal \
    TEPAL_FLEET_API_ADDRESS=0.0.0.0:9092
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tepal-server" \
      org.opencontainers.image.description="Flower SuperLink and ServerApps of Tepal, kept running" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
USER 49999:49999
WORKDIR /app
# Only the Fleet API. Anyone who reaches the control port can run code at every site: it listens on loopback only.
EXPOSE 9092
HEALTHCHECK --interval=30s --timeout=20s --retries=3 --start-period=180s --start-interval=3s \
    CMD ["tepal", "server", "status"]
CMD ["tepal", "server"]
