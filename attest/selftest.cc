#include "attest/selftest.h"

#include <cstring>

#include "attest/base/canonical.h"
#include "attest/base/hex.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "attest/keys.h"

namespace bitwitness {
namespace {

Bytes unhex(const char* text) {
  return from_hex(text).value();
}

// Test input by the rule of the golden vectors: bytes cycle through a prime number of values.
Bytes prime_cycle(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i % 251);
  return bytes;
}

SelftestResult compare(const std::string& name, const std::string& expected,
                       const std::string& actual) {
  if (expected == actual) return {name, true, ""};
  return {name, false, "expected " + expected + ", got " + actual};
}

Digest portable_leaf(const LeafPrefix& prefix, const Bytes& payload) {
  const std::uint32_t count = leaf_chunk_count(payload.size());
  std::vector<DigestWords> digests(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    digests[i] = chunk_digest_bytes(prefix, i, count, leaf_chunk_bytes(payload.size(), i),
                                    payload.data() + std::size_t{i} * kLeafChunkBytes);
  }
  return to_digest(reduce_chunks(digests.data(), count));
}

// RFC 8032 §7.1, TEST 3.
SelftestResult ed25519_known_answer() {
  const Bytes seed = unhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7");
  const Bytes message = unhex("af82");
  const std::string expected =
      "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
      "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a";
  const SigningKey key = SigningKey::from_seed("rfc8032", seed);
  const auto signature = key.sign(message);
  SelftestResult result = compare("Ed25519, RFC 8032 test 3", expected, to_hex(signature));
  auto forged = signature;
  forged[10] ^= 1;
  if (!key.public_key().verify(message, signature) || key.public_key().verify(message, forged)) {
    return {result.name, false, "verification does not tell a good signature from a bad one"};
  }
  return result;
}

// The eight entries of the reference tree of RFC 6962 implementations.
SelftestResult merkle_known_answer() {
  std::vector<Digest> leaves;
  for (const char* entry : {"", "00", "10", "2021", "3031", "40414243", "5051525354555657",
                            "606162636465666768696a6b6c6d6e6f"}) {
    leaves.push_back(merkle_leaf(unhex(entry)));
  }
  SelftestResult result =
      compare("Merkle tree, RFC 6962 reference root",
              "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
              merkle_root(leaves).hex());
  const auto proof = inclusion_proof(leaves, 5);
  if (!verify_inclusion(leaves[5], 5, 8, proof, merkle_root(leaves)) ||
      verify_inclusion(leaves[4], 5, 8, proof, merkle_root(leaves))) {
    return {result.name, false, "an inclusion proof is judged wrongly"};
  }
  return result;
}

}  // namespace

std::vector<SelftestResult> attest_selftest() {
  std::vector<SelftestResult> results;
  // FIPS 180-4 example.
  results.push_back(compare("SHA-256 of \"abc\"",
                            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
                            sha256("abc").hex()));
  // tests/data/attest/leaf_vectors.txt has these and more.
  const LeafPrefix prefix{LeafType::kRow, static_cast<std::uint8_t>(Dtype::kFp32), 3, 70000};
  for (const std::size_t size : {0U, 4U, 1023U, 1024U, 1025U, 5000U}) {
    const Bytes payload = prime_cycle(size);
    results.push_back(
        compare("hash tree of " + std::to_string(size) + " bytes, portable against OpenSSL",
                portable_leaf(prefix, payload).hex(), leaf_digest(prefix, payload).hex()));
  }
  results.push_back(compare("hash tree, known answer for 5000 bytes",
                            "73a3969ca149a7f7712eedc1190c7397b60caa6e85b467991f2ffb4e6da0aa31",
                            leaf_digest(prefix, prime_cycle(5000)).hex()));
  results.push_back(merkle_known_answer());
  results.push_back(ed25519_known_answer());
  Writer writer;
  writer.u8(1);
  writer.u16(0x0203);
  writer.u32(0x04050607);
  writer.u64(0x08090a0b0c0d0e0fULL);
  writer.str("bw");
  results.push_back(compare("canonical bytes", "010302070605040f0e0d0c0b0a0908020000006277",
                            to_hex(writer.data())));
  return results;
}

}  // namespace bitwitness
