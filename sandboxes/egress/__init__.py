"""The way out of a sandbox that may reach a list of hosts: an HTTP proxy on the host, for that sandbox alone.

`rules` decides, `proxy` serves, `process` runs a service's proxies, and `host` starts it.
"""
