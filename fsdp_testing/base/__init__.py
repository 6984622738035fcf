"""What every room stands on: settings of the environment, torch's private names, backends, documents, text for a terminal."""
