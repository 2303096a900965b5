#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/fake_engine.h"
#include "core/sim_channel.h"

namespace gpumode {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline OpDesc all_reduce(size_t numel = 1024, ReduceOp op = ReduceOp::Sum) {
  OpDesc desc;
  desc.collective = Collective::AllReduce;
  desc.dtype = DType::F32;
  desc.reduce_op = op;
  desc.outputs = {Buffer{nullptr, numel * sizeof(float)}};
  return desc;
}

inline OpDesc broadcast(size_t numel, int root) {
  OpDesc desc;
  desc.collective = Collective::Broadcast;
  desc.dtype = DType::F32;
  desc.root = root;
  desc.outputs = {Buffer{nullptr, numel * sizeof(float)}};
  return desc;
}

inline OpDesc transfer(Collective direction, int peer, int tag = 0) {
  OpDesc desc;
  desc.collective = direction;
  desc.peer = peer;
  desc.tag = tag;
  return desc;
}
inline OpDesc send_to(int peer, int tag = 0) { return transfer(Collective::Send, peer, tag); }
inline OpDesc recv_from(int peer, int tag = 0) { return transfer(Collective::Recv, peer, tag); }

// Members 0 ... n-1 of a simulated world, each with its communicator.
struct SimGroup {
  SimGroup(int size, SimWorld::Options world_options, Communicator::Options options = {})
      : world(world_options) {
    for (int member = 0; member < size; ++member) {
      auto engine = std::make_unique<FakeEngine>(&world, member);
      engines.push_back(engine.get());
      members.push_back(std::make_unique<Communicator>(std::move(engine), options));
    }
    std::vector<int> everybody;
    for (int member = 0; member < size; ++member) everybody.push_back(member);
    for (int member : everybody) rebuild(member, 1, everybody);
  }

  // `member` joins epoch `uuid` of `survivors`.
  Status rebuild(int member, int64_t uuid, const std::vector<int>& survivors) {
    Membership membership;
    membership.uuid = uuid;
    int rank = -1;
    for (int survivor : survivors) {
      if (survivor == member) rank = static_cast<int>(membership.handles.size());
      membership.handles.push_back(engines[survivor]->handle());
    }
    return members[member]->rebuild(membership, rank, seconds(10));
  }

  Communicator& operator[](int member) { return *members[member]; }

  SimWorld world;
  std::vector<FakeEngine*> engines;
  std::vector<std::unique_ptr<Communicator>> members;
};

}  // namespace gpumode
