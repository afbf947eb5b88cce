// Fetch a URL with Node's own fetch. An error is printed as Node prints one that nobody caught: with its cause.

const reply = await fetch(process.argv[2]);
console.log(await reply.text());
process.exitCode = reply.ok ? 0 : 1;
