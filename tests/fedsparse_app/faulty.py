"""The client app with the training of some clients replaced."""

from flwr.clientapp import ClientApp

from fedsparse_app.client_app import app as client_app


def faulty(what, *clients):
    """Return the client app in which ``what(message, context)`` trains ``clients``."""
    app = ClientApp()

    @app.query()
    def hello(message, context):
        return client_app(message, context)

    @app.train()
    def train(message, context):
        if message.content.config_records["job"]["client"] in clients:
            return what(message, context)
        return client_app(message, context)

    @app.evaluate()
    def evaluate(message, context):
        return client_app(message, context)

    return app
