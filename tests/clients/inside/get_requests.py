"""Fetch a URL with requests; a refusal of a plain-HTTP request is a reply, and shown as one."""

import sys

import requests

reply = requests.get(sys.argv[1])
print(reply.text)
reply.raise_for_status()
