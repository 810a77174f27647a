"""What is learned: models, channels, data and local training; nothing here knows of federation."""
