"""Programs that tests and the demo run inside sandboxes, with `Sandbox.python`. Each prints what it found and ends well."""

from typing import Final

PORT: Final = 8000
GREETING: Final = "somebody is at home"

# The official SDK with nothing but the environment; argument: the model.
ASK_MODEL: Final = """
import anthropic, sys
with anthropic.Anthropic().messages.stream(
    model=sys.argv[1], max_tokens=100, messages=[{"role": "user", "content": "Say hello in five words."}]
) as stream:
    pieces = [text for text in stream.text_stream]
    usage = stream.get_final_message().usage
print(len(pieces), usage.output_tokens, "".join(pieces))
"""

# Looks for secrets without being told them: wherever their prefix stands, the bytes that follow are hashed. Arguments:
# their common prefix and length, the SHA-256 of each. Prints how many files it read, and for those that hold one which.
SEARCH: Final = """
import glob, hashlib, os, sys
prefix, length, digests = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3:]
files = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/mountinfo")
for folder, folders, names in os.walk("/"):
    if folder in ("/proc", "/sys", "/dev"):
        folders.clear()
    else:
        files += [os.path.join(folder, name) for name in names]
found, read = [], 0
for name in files:
    try:
        if not (name.startswith("/proc") or os.path.isfile(name)):
            continue
        with open(name, "rb") as file:
            data = file.read()
    except OSError:
        continue
    read += 1
    here = set()
    at = data.find(prefix)
    while at >= 0:
        here.add(hashlib.sha256(data[at : at + length]).hexdigest())
        at = data.find(prefix, at + 1)
    found += [f"{digests.index(digest)} {name}" for digest in here.intersection(digests)]
print(read, *found, sep="\\n")
"""

# Connects to PORT of an address, for at most some seconds. Prints how many it took, and the answer.
CONNECT: Final = f"""
import socket, sys, time
begun = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as s:
        s.settimeout(60)  # it is open, whenever who answers has its turn
        s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        answer = s.makefile().read()
        print(time.monotonic() - begun, answer)
except OSError as error:
    print("closed:", error)
"""

# Greets whoever connects to PORT.
SERVE: Final = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("listening", flush=True)
    while True:
        peer, _ = server.accept()
        # Read first: closing with unread bytes would send a reset.
        peer.recv(100)
        peer.sendall(b"{GREETING}\\n")
        peer.close()
"""

# Looks a name up.
RESOLVE: Final = """
import socket, sys
try:
    print("resolved:", socket.gethostbyname(sys.argv[1]))
except OSError as error:
    print("unresolved:", error)
"""
