"""Which parts are scripts of findings made of? Modules that need torch alone: their text is copied into each script."""
