#!/bin/bash
cat >/srv/counter/server.py <<'PYTHON'
from http.server import BaseHTTPRequestHandler, HTTPServer

count = 0


class Counter(BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(count).encode())


HTTPServer(("127.0.0.1", 8765), Counter).serve_forever()
PYTHON
printf '#!/bin/bash\nexec python3 /srv/counter/server.py\n' >/srv/counter/start.sh
chmod +x /srv/counter/start.sh
