"""`opificia doctor`: proves from inside a sandbox that the isolation holds, and looks at the host around it."""
