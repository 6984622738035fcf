"""The base of every room: settings of the environment, torch's private names, backends, documents, text for a terminal."""
