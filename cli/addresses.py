"""Addresses of servers, as clients want them."""


def base_url(host: str, port: int) -> str:
    """The URL of a server of this machine.

    >>> base_url("10.0.0.5", 8000), base_url("::1", 8000)
    ('http://10.0.0.5:8000', 'http://[::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
