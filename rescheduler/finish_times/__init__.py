"""When requests will start and finish, promises about it, and the load ahead."""
