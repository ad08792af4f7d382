"""Launchers: render what is started on each node (pure), start it, and see it to its end."""
