"""What a machine with one GPU shows in half an hour; see __main__.py."""
