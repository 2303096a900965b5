#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <vector>

#include "core/op.h"
#include "core/status.h"
#include "host/epoch.h"

namespace gpumode::host {

// Sends and receives of one rank in one epoch. They run beside each other and beside collectives.
//
// A sender announces each send with a record, in order; a small one carries its bytes along and is
// done. The receiver matches records with posted receives by source and tag, first come first
// served, and grants the larger ones; granted sends stream their bytes in the order of the grants.
// So a send without a receive holds up nobody, and unmatched sends cost the receiver at most
// kMaxUnmatchedEager small buffers per peer.
class PointToPoint {
 public:
  struct Transfer {
    uint64_t id;  // the caller's
    bool is_send;
    int peer;  // or kAnySource
    int tag;
    DType dtype;
    Buffer buffer;
  };
  struct Finished {
    uint64_t id;
    Status status;
    int source;
  };

  explicit PointToPoint(Epoch& epoch);

  void start(const Transfer& transfer);
  // Advances all transfers; returns whether anything moved.
  bool poll(std::vector<Finished>* finished);
  // The ranks that transfer `id` cannot finish without.
  std::vector<int> waiting_for(uint64_t id) const;
  bool idle() const { return num_open_ == 0; }

 private:
  static constexpr uint64_t kMaxUnmatchedEager = 64;

  struct Stream {
    Transfer transfer;
    size_t moved = 0;
  };
  struct Unmatched {  // an announced send for which no receive is posted yet
    uint64_t send_id;
    uint64_t nbytes;
    int tag;
    DType dtype;
    bool eager;
    std::vector<std::byte> payload;
  };
  struct ToPeer {
    std::deque<Transfer> unannounced;
    std::map<uint64_t, Transfer> announced;  // by the number that the record carries
    std::deque<Stream> streaming;
    uint64_t next_number = 1;
    uint64_t eager_sent = 0;
  };
  struct FromPeer {
    std::list<Unmatched> unmatched;
    std::deque<uint64_t> ungranted;  // grants that found the ring full
    std::deque<Stream> streaming;
  };

  bool announce(int peer, std::vector<Finished>* finished);
  bool take_grants(int peer);
  bool stream_out(int peer, std::vector<Finished>* finished);
  bool take_records(int peer, std::vector<Finished>* finished);
  bool push_grants(int peer);
  bool stream_in(int peer, std::vector<Finished>* finished);
  bool match_posted(std::vector<Finished>* finished);
  bool match_own(std::vector<Finished>* finished);
  static bool takes(const Transfer& receive, int peer, int tag) {
    return receive.tag == tag && (receive.peer == peer || receive.peer == kAnySource);
  }
  Status check(const Transfer& receive, int peer, int tag, size_t nbytes, DType dtype) const;
  void accept(const Transfer& receive, int peer, const Unmatched& send, const std::byte* payload,
              std::vector<Finished>* finished);
  void finish(uint64_t id, Status status, int source, std::vector<Finished>* finished);

  Epoch& epoch_;
  std::vector<ToPeer> to_;
  std::vector<FromPeer> from_;
  std::list<Transfer> own_;     // sends of this rank to itself, which wait for their receives
  std::list<Transfer> posted_;  // receives without a match, in the order of their posting
  size_t num_unexamined_ = 0;   // the last so many of posted_ have not met unmatched sends yet
  size_t num_open_ = 0;
};

}  // namespace gpumode::host
