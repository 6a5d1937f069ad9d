"""What the compose file and the demo overlay of Kubernetes need besides the daemons: passwords and database logins."""
