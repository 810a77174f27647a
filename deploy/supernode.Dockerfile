# The ClientApp runs in the SuperNode's container.
ARG FLWR_VERSION=1.42.0
FROM flwr/supernode:${FLWR_VERSION}
COPY deploy/requirements-device.txt /tmp/
RUN python -m pip install --no-cache-dir -r /tmp/requirements-device.txt
COPY --chown=app:app deploy/supernode.py /app/deploy/supernode.py
COPY --chown=app:app deploy/warm /app/deploy/warm
ENTRYPOINT ["python", "/app/deploy/supernode.py"]
