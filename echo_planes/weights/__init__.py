"""Transfer of weights from the learner to the engines: as patches, along chains of peers, proven by digests.

In: the learner's tensors (`publisher`). Out: the engine's tensors, bit for bit (`receiver`, `shards`), and
a store of versions. Between them: `wire` (manifests, signatures, frames), `codec`, `chain` (the forwarding
topology), `store`, and `node`, the process beside each learner and worker that moves the bytes. `link` holds
the settings and the weight source that the other planes use. Imports: types, errors, config, cluster.
"""
