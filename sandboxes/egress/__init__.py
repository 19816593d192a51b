"""The way out of a sandbox that may reach a list of hosts: an HTTP proxy on the host, for one sandbox alone.

`rules` decide, `proxy` serves, `process` holds the proxies of a service in a process of their own, which `host` starts.
"""
