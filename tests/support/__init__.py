"""What the tests stand on: an exact tiny model, a real server around it, and a client with nothing hidden."""
