"""Fetch a URL with Python's own library, as a script would."""

import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1]) as reply:
    print(reply.read().decode())
