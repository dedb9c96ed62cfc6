// SIMULATED in packets: flows on given paths through a small leaf-spine fabric, by ns-3 (3.37). check_packets.py compiles and runs it.
//
// Input: "nodes links flows", then a line a directed link "from to Mb/s" (both directions are given, each with its own rate, as two
// one-way uses of one device pair of the larger rate would mix them: each directed link is a device pair of its own), then a line a
// flow: number of its nodes and the links it takes. Every flow has a source and a sink of its own, beyond its first and last link.
// Argument: seconds that are counted. Output: bytes a second that each flow delivered in these, which begin after the first second.
#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

#include <cstdlib>
#include <iostream>
#include <vector>

using namespace ns3;

namespace {
const double kWarm = 1.0;

struct Wire {
    uint32_t from, to, out, back;  // nodes; interface of `from` towards `to`, and of `to` towards `from`
    Ipv4Address near, far;
};

uint32_t nets = 0;

// A two-way wire between two nodes. ACKs return on it, which is why `back` is wide: only the data direction is limited.
Wire Connect(NodeContainer& nodes, uint32_t from, uint32_t to, double mbps) {
    PointToPointHelper helper;
    helper.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(10e9))));
    helper.SetChannelAttribute("Delay", StringValue("100us"));
    // Packets wait in the fair queue above the device, not in the device.
    helper.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("1p"));
    NetDeviceContainer ends = helper.Install(nodes.Get(from), nodes.Get(to));
    ends.Get(0)->SetAttribute("DataRate", DataRateValue(DataRate(uint64_t(mbps * 1e6))));
    // Fair queues stand for congestion control that shares a link equally: what is compared is the sharing, not the control.
    TrafficControlHelper control;
    control.SetRootQueueDisc("ns3::FqCoDelQueueDisc");
    control.Install(ends);
    Ipv4AddressHelper addresses;
    uint32_t base = (10u << 24) + 4 * nets++;
    addresses.SetBase(Ipv4Address(base), "255.255.255.252");
    Ipv4InterfaceContainer given = addresses.Assign(ends);
    return {from, to, given.Get(0).second, given.Get(1).second, given.GetAddress(0), given.GetAddress(1)};
}

Ptr<Ipv4StaticRouting> Routes(Ptr<Node> node) {
    Ipv4StaticRoutingHelper helper;
    return helper.GetStaticRouting(node->GetObject<Ipv4>());
}
}  // namespace

int main(int, char** argv) {
    const double counted = atof(argv[1]);
    uint32_t count, links, flows;
    std::cin >> count >> links >> flows;
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(1448));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(1 << 20));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(1 << 20));
    NodeContainer nodes;
    nodes.Create(count + 2 * flows);
    InternetStackHelper().Install(nodes);
    std::vector<Wire> wires;
    for (uint32_t i = 0; i < links; ++i) {
        uint32_t from, to;
        double mbps;
        std::cin >> from >> to >> mbps;
        wires.push_back(Connect(nodes, from, to, mbps));
    }
    std::vector<Ptr<PacketSink>> sinks;
    for (uint32_t flow = 0; flow < flows; ++flow) {
        uint32_t hops;
        std::cin >> hops;
        std::vector<Wire> way;
        std::vector<uint32_t> path(hops);
        for (auto& link : path) std::cin >> link;
        const uint32_t source = count + 2 * flow, sink = source + 1;
        way.push_back(Connect(nodes, source, wires[path.front()].from, 10000));
        for (auto link : path) way.push_back(wires[link]);
        way.push_back(Connect(nodes, wires[path.back()].to, sink, 10000));
        const Ipv4Address to = way.back().far, from = way.front().near;
        for (size_t i = 0; i < way.size(); ++i) {
            Routes(nodes.Get(way[i].from))->AddHostRouteTo(to, way[i].far, way[i].out);
            Routes(nodes.Get(way[i].to))->AddHostRouteTo(from, way[i].near, way[i].back);
        }
        PacketSinkHelper taking("ns3::TcpSocketFactory", InetSocketAddress(Ipv4Address::GetAny(), 5000));
        ApplicationContainer taker = taking.Install(nodes.Get(sink));
        sinks.push_back(DynamicCast<PacketSink>(taker.Get(0)));
        BulkSendHelper giving("ns3::TcpSocketFactory", InetSocketAddress(to, 5000));
        ApplicationContainer giver = giving.Install(nodes.Get(source));
        giver.Start(Seconds(0.01 * (flow % 10)));
    }
    std::vector<uint64_t> before(flows);
    Simulator::Schedule(Seconds(kWarm), [&] {
        for (uint32_t i = 0; i < flows; ++i) before[i] = sinks[i]->GetTotalRx();
    });
    Simulator::Stop(Seconds(kWarm + counted));
    Simulator::Run();
    for (uint32_t i = 0; i < flows; ++i) std::cout << double(sinks[i]->GetTotalRx() - before[i]) / counted << "\n";
    Simulator::Destroy();
}
