// Node's @parse/node-apn in a bare loop: no database, no deadlines, no retries of ours. Run by the benchmark as a
// process of its own. Reads a number of pushes from each line of stdin, sends them, and prints one JSON line.
'use strict';

const { randomUUID } = require('crypto');
const fs = require('fs');
const readline = require('readline');
const apn = require(process.argv[2]);

const told = JSON.parse(process.argv[3]);
const provider = new apn.Provider({
  token: { key: told.key_file, keyId: told.key_id, teamId: told.team_id },
  address: told.host,
  port: told.port,
  ca: fs.readFileSync(told.ca_file),
  production: true,
});
const payload = JSON.parse(told.payload);

async function sender(devices) {
  let accepted = 0;
  while (devices.length) {
    const note = new apn.Notification();
    note.rawPayload = payload;
    note.id = randomUUID();
    note.topic = told.topic;
    note.pushType = 'alert';
    note.priority = 10;
    const { sent, failed } = await provider.send(note, devices.pop());
    accepted += sent.length;
    if (failed.length) console.error(failed[0]);
  }
  return accepted;
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const count = Number(line);
    const devices = Array.from({ length: count }, (_, at) => at.toString(16).padStart(64, '0'));
    const cpu = process.cpuUsage();
    const began = process.hrtime.bigint();
    const senders = Array.from({ length: told.in_flight }, () => sender(devices));
    const accepted = (await Promise.all(senders)).reduce((a, b) => a + b, 0);
    const seconds = Number(process.hrtime.bigint() - began) / 1e9;
    const used = process.cpuUsage(cpu);
    console.log(JSON.stringify({ accepted, seconds, cpu: (used.user + used.system) / 1e6 }));
  }
  provider.shutdown();
}

main();
