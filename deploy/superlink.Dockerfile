# The ServerApp runs in the SuperLink's container and needs what the project needs.
ARG FLWR_VERSION=1.42.0
FROM flwr/superlink:${FLWR_VERSION}
COPY --chown=app:app pyproject.toml README.md LICENSE /tmp/project/
COPY --chown=app:app fedsparse_app /tmp/project/fedsparse_app
COPY --chown=app:app strategies /tmp/project/strategies
COPY --chown=app:app task /tmp/project/task
# Its dependencies stay, the project itself goes: the code comes with each run.
RUN python -m pip install --no-cache-dir /tmp/project && python -m pip uninstall -y fedsparse
