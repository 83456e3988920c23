// Command main verifies a Bitwitness log with the Go project's own note and tlog packages.
//
//	main LOG-DIR VKEY RECEIPT RECORD-DIGEST-HEX
//
// It checks the checkpoint's signature, authenticates every tile against the signed root, recomputes the
// leaf hash of every entry, proves the tree consistent with each smaller size, and checks the receipt.
package main

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type tiles struct{ dir string }

func (t tiles) Height() int                            { return 8 }
func (t tiles) SaveTiles([]tlog.Tile, [][]byte)        {}
func (t tiles) ReadTiles(list []tlog.Tile) (out [][]byte, err error) {
	for _, tile := range list {
		// tlog's paths name the height; tlog-tiles fixes it to 8 and drops it.
		path := "tile/" + strings.TrimPrefix(tile.Path(), "tile/8/")
		data, err := os.ReadFile(filepath.Join(t.dir, path))
		if err != nil {
			return nil, err
		}
		out = append(out, data)
	}
	return out, nil
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func openCheckpoint(text []byte, verifier note.Verifier) tlog.Tree {
	opened, err := note.Open(text, note.VerifierList(verifier))
	must(err)
	lines := strings.Split(opened.Text, "\n")
	if lines[0] != verifier.Name() {
		log.Fatalf("origin %q", lines[0])
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	must(err)
	root, err := tlog.ParseHash(lines[2])
	must(err)
	return tlog.Tree{N: size, Hash: root}
}

func entries(dir string, size int64) (out [][]byte) {
	for n := int64(0); n*256 < size; n++ {
		tile := tlog.Tile{H: 8, L: 0, N: n, W: 256}
		if size-n*256 < 256 {
			tile.W = int(size - n*256)
		}
		path := "tile/entries/" + strings.TrimPrefix(tile.Path(), "tile/8/0/")
		data, err := os.ReadFile(filepath.Join(dir, path))
		must(err)
		for len(data) > 0 {
			length := int(binary.BigEndian.Uint16(data))
			out = append(out, data[2:2+length])
			data = data[2+length:]
		}
	}
	return out
}

func main() {
	log.SetFlags(0)
	dir, vkey, receiptFile, recordHex := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	verifier, err := note.NewVerifier(vkey)
	must(err)
	text, err := os.ReadFile(filepath.Join(dir, "checkpoint"))
	must(err)
	tree := openCheckpoint(text, verifier)
	reader := tlog.TileHashReader(tree, tiles{dir})

	all := entries(dir, tree.N)
	if int64(len(all)) != tree.N {
		log.Fatalf("%d entries in a tree of %d", len(all), tree.N)
	}
	for i, entry := range all {
		hashes, err := reader.ReadHashes([]int64{tlog.StoredHashIndex(0, int64(i))})
		must(err)
		if hashes[0] != tlog.RecordHash(entry) {
			log.Fatalf("entry %d does not hash to its leaf", i)
		}
	}
	for n := int64(1); n < tree.N; n += 1 + n/3 {
		proof, err := tlog.ProveTree(tree.N, n, reader)
		must(err)
		old, err := tlog.TreeHash(n, reader)
		must(err)
		must(tlog.CheckTree(proof, tree.N, tree.Hash, n, old))
	}

	receipt, err := os.ReadFile(receiptFile)
	must(err)
	head, checkpoint, found := strings.Cut(string(receipt), "\n\n")
	if !found {
		log.Fatal("receipt without checkpoint")
	}
	signed := openCheckpoint([]byte(checkpoint), verifier)
	lines := strings.Split(head, "\n")
	if lines[0] != "c2sp.org/tlog-proof@v1" || !strings.HasPrefix(lines[1], "extra ") {
		log.Fatalf("receipt begins %q", lines[:2])
	}
	entry := "bitwitness/log-entry/v1\nrecord " + recordHex + "\n"
	extra, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(lines[1], "extra "))
	must(err)
	if string(extra) != entry {
		log.Fatal("the receipt is for another record")
	}
	index, err := strconv.ParseInt(strings.TrimPrefix(lines[2], "index "), 10, 64)
	must(err)
	var proof tlog.RecordProof
	for _, line := range lines[3:] {
		hash, err := tlog.ParseHash(line)
		must(err)
		proof = append(proof, hash)
	}
	must(tlog.CheckRecord(proof, signed.N, signed.Hash, index, tlog.RecordHash([]byte(entry))))
	fmt.Printf("%s: %d entries, receipt of entry %d\n", verifier.Name(), tree.N, index)
}
